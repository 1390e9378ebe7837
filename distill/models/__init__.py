"""Loading models, and making students."""

import logging


def _is_not_about_masks(record: logging.LogRecord) -> bool:
    """False for the warning that a batch without a mask may be padded.

    Models are given none where nothing is padding, and the token that fills up may also be the end of a text.
    """
    return "passing in an `attention_mask`" not in record.getMessage()


logging.getLogger("transformers.modeling_utils").addFilter(_is_not_about_masks)
