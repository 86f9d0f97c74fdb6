"""SGLang's routes: `/generate`, health, the model."""
