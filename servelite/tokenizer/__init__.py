"""Text and tokens: model metadata, tokenizers, chat templates, incremental detokenizing. No torch."""
