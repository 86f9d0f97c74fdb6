"""Request fields of other servers: fields without effect, aliases, and fields that Ramet does not support.

For an unsupported field, the tables list the values that ask for nothing special. These values are accepted.
`unknown_fields.py` says what becomes of fields that no table has.
"""

from typing import Any

Values = tuple[Any, ...]
_OFF: Values = (False,)
# False is included, because some clients send it for features that they do not use.
EMPTY: Values = ([], {}, "", False)
_ONE: Values = (1,)
_ZERO: Values = (0,)
_ALL: Values = (-1,)

# Fields without effect: they control how another server logs, batches, routes, caches or stores a request.
OPERATION = frozenset(
    {"log_metrics", "no_logs", "background", "keep_alive", "cache_prompt", "id_slot", "n_keep", "n_cache_reuse"}
    | {"return_progress", "timings_per_token", "stream_interval", "custom_labels", "conversation_id", "session_id"}
    | {"external_trace_header", "received_time", "validation_time", "http_worker_ipc", "data_parallel_rank"}
    | {"routed_dp_rank", "dp_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank_decode"}
    | {"disagg_prefill_dp_rank", "spaces_between_special_tokens", "guided_decoding_backend", "n_discard"}
    | {"return_cached_tokens_details", "return_tokens"}
    # Options of samplers that are refused unless they are off.
    | {"mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length"}
    | {"dry_penalty_last_n", "dry_sequence_breakers", "adaptive_decay"}
)
# Fields without effect: what OpenAI stores or bills, and hints to its servers.
OPENAI = frozenset(
    {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_retention", "verbosity"}
    | {"prediction", "prompt_cache_key", "separate_reasoning", "stream_reasoning", "include_reasoning"}
    | {"reasoning_format", "moderation"}
)

SAMPLING_ALIASES = {
    "repeat_penalty": "repetition_penalty",
    "include_stop_str_in_output": "no_stop_trim",
    "ban_eos_token": "ignore_eos",
    "stopping_strings": "stop",
}
FORMAT_ALIASES = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "ebnf": "grammar",
}
REQUEST_ALIASES = {"rid": "request_id", "extra_key": "cache_salt"}
SAMPLING: dict[str, Values] = {
    "use_beam_search": _OFF, "early_stopping": _OFF, "length_penalty": _ONE, "structural_tag": EMPTY,
    "stop_regex": EMPTY, "custom_params": EMPTY, "grammar_string": EMPTY,
    "logits_processors": EMPTY, "custom_logit_processor": EMPTY, "whitespace_pattern": EMPTY,
    "typical_p": _ONE, "typical": _ONE, "typ_p": _ONE,
    "guided_whitespace_pattern": EMPTY, "tfs_z": _ONE, "mirostat": _ZERO, "top_a": _ZERO, "top_n_sigma": (-1, 0),
    "dynatemp_range": _ZERO, "xtc_probability": _ZERO, "dry_multiplier": _ZERO, "thinking_token_budget": _ALL,
    "repeat_last_n": _ALL, "min_keep": _ZERO, "samplers": EMPTY, "repetition_detection": EMPTY,
    "no_repeat_ngram_size": _ZERO,
}  # fmt: skip
# Of these, samplers: with another value they are left out, because an answer without them is still an answer.
SAMPLERS = frozenset(
    {"typical_p", "typical", "typ_p", "tfs_z", "mirostat", "top_a", "top_n_sigma", "dynatemp_range", "min_keep"}
    | {"xtc_probability", "dry_multiplier", "repeat_last_n", "samplers", "no_repeat_ngram_size"}
    | {"thinking_token_budget", "repetition_detection", "early_stopping", "length_penalty"}
)
MODEL: dict[str, Values] = {
    "lora_id": EMPTY, "lora": EMPTY, "adapter_id": EMPTY, "session_params": EMPTY,
    "kv_transfer_params": EMPTY, "vllm_xargs": EMPTY, "image_data": EMPTY, "video_data": EMPTY, "audio_data": EMPTY,
    "input_embeds": EMPTY, "prompt_embeds": EMPTY, "mm_processor_kwargs": EMPTY, "media_io_kwargs": EMPTY,
    "return_hidden_states": _OFF, "return_routed_experts": _OFF, "return_entropy": _OFF, "return_bytes": _OFF,
    "token_ids_logprob": EMPTY, "logprob_token_ids": EMPTY, "return_tokens_as_token_ids": _OFF,
}  # fmt: skip
# Advice in the error for an unsupported field.
_ADAPTER = ": name the adapter in `model`, as ADAPTER or MODEL:ADAPTER"
_CHOSEN = ": log-probabilities are reported for the tokens of the answer and for the most likely ones"
INSTEAD = {
    **dict.fromkeys(("lora", "lora_id", "adapter_id"), _ADAPTER),
    "functions": ": use tools",
    "grammar_string": ": use grammar",
    **dict.fromkeys(("token_ids_logprob", "logprob_token_ids"), _CHOSEN),
    "stop_regex": ": use stop, or a regex for the whole answer",
    "reasoning_format": ": use separate_reasoning",
    "background": ": keep the connection open, or use `stream`",
    "conversation": ": use previous_response_id",
    "prompt": ": no prompt templates are stored; send the text as input",
}
# Fields without effect of what an answer has, and a client sends back with its history.
ANSWERED = frozenset(
    {"id", "object", "status", "index", "annotations", "logprobs", "parsed", "parsed_arguments", "signature", "caller"}
    | {"encrypted_content", "execution", "model", "phase", "stop_reason", "stop_sequence", "stop_details", "usage"}
    | {"container", "created", "created_by", "finish_reason", "text_signature"}
)
# Request fields of vLLM, SGLang, llama.cpp, Ollama, OpenRouter, text-generation-webui, KoboldAI, SillyTavern and hosted
# APIs, and fields of their messages. They are no typing errors of Ramet's own, however near.
_PEERS = """
adaptive_target add_bos_token api_server api_type auto_max_new_tokens banned_strings banned_tokens bot_name
cache_control caller character chat_instruct_command chat_template_str context custom_token_bans do_sample
dynamic_temperature dynatemp_high dynatemp_low encoder_repetition_penalty epsilon_cutoff eta_cutoff extra_body
extra_content extra_headers extra_query function_call greeting guidance_scale images instruction_template
instruction_template_str legacy_api logit_bias_exp max_context_length max_length max_temp max_tokens_second memory
min_length min_temp mirostat_mode mode models name1 name2 negative_prompt nsigma num_batch num_beams num_ctx num_gpu
num_thread options penalize_nl penalty_alpha plugins post_sampling_probs preset prompt_lookup_num_tokens provider
provider_options provider_specific_fields quiet raw reasoning_details reasoning_opaque reasoning_signature
reasoning_split rep_pen rep_pen_range rep_pen_slope repetition_penalty_range reasoning route safe_prompt sampler_order
sampler_priority sampler_seed search_parameters skew smoothing_curve smoothing_factor static_cache system_prompt
temperature_last template tfs thinking thinking_blocks thinking_config tool_config tool_name tool_stream transforms
trim_stop truncate truncation_length usage use_default_badwordsids user_bio user_name
"""
COMPLETION: dict[str, Values] = {"truncation_side": ("left",)}
CHAT: dict[str, Values] = {
    "functions": EMPTY, "function_call": ("none", "auto"), "modalities": (["text"], []), "audio": EMPTY,
    "chat_template": EMPTY, "echo": _OFF, "best_of": _ONE, "truncation_side": ("left",),
    "input_ids": EMPTY, "images_config": EMPTY, "reasoning_format": ("auto", "deepseek"),
}  # fmt: skip
STRANGERS = frozenset(_PEERS.split())
PEERS = STRANGERS | OPERATION | OPENAI
PEERS |= {name for table in (SAMPLING_ALIASES, FORMAT_ALIASES, SAMPLING, MODEL, CHAT) for name in table}
