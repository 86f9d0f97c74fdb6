"""Load on any server with SGLang's or OpenAI's API, over HTTP alone."""
