"""The grouped product of rows and experts' weights, its tilings and tensor maps."""
