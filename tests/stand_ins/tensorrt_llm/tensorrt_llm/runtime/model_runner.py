"""What LoRA needs to know of a model."""


def _engine_config_to_model_config(engine_config):
    return engine_config.pretrained_config
