"""Serving: a closed loop of users, with transports side by side in one engine."""
