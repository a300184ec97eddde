# SPDX-License-Identifier: Apache-2.0
"""What the page shows of private training, whatever the model."""
from weft.page import Section
from weft.text import member, text_of

OF_RESULT = ("epsilon", "delta", "accountant", "noise_multiplier", "sample_rate", "steps", "records", "clip")
OF_SETTINGS = ("algorithm", "mode", "scheme", "clip_function", "clipping", "clip_quantile", "clip_rate", "count_noise",
               "sampling", "most_records", "unit", "record_rows", "noise_key")


def privacy_sections(facts):
    """The guarantee of a private run; nothing for others."""
    settings = facts.of("input", "privacy")
    if member(settings, "enabled") is not True:
        return []
    section = Section("Privacy")
    section.paragraph("There is no curve of the training loss: it is not recorded, because no noise protects it.", "state")
    result = facts.of("result", "privacy")
    if not isinstance(result, dict):
        section.paragraph("The training is private; epsilon is known when the run has ended.", "missing")
    else:
        if result.get("private") is False:
            section.paragraph('Not private: the noise follows from run.seed (privacy.noise_key = "test"). The epsilon is that of the same '
                              "run with a secret key.", "bad")
        section.paragraph(f"Protected: {text_of(result.get('protects'))}.")
    rows = [(name, text_of(member(values, name))) for values, names in ((result, OF_RESULT), (settings, OF_SETTINGS)) for name in names
            if member(values, name) is not None]
    section.table(["privacy", "value"], rows, 1)
    return [section]
