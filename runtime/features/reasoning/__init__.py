"""ReasonCache: pages of reasoning steps that repeat within an output are shared."""
