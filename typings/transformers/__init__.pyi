"""Names of transformers that the project takes from its root, each from its own file: the root's list makes
the type checker read all of its 400 models, which took a third of its time."""

from transformers.cache_utils import StaticCache as StaticCache
from transformers.generation.configuration_utils import CompileConfig as CompileConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig as ContinuousBatchingConfig
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config as DeepseekV2Config
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config as DeepseekV3Config
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig as GptOssConfig
from transformers.models.mixtral.configuration_mixtral import MixtralConfig as MixtralConfig
from transformers.models.phimoe.configuration_phimoe import PhimoeConfig as PhimoeConfig
from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig as Qwen2MoeConfig
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig as Qwen3MoeConfig
from transformers.trainer import Trainer as Trainer
from transformers.trainer_callback import TrainerCallback as TrainerCallback
from transformers.trainer_callback import TrainerState as TrainerState
from transformers.training_args import TrainingArguments as TrainingArguments
from transformers.utils import logging as logging

__version__: str
