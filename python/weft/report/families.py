# SPDX-License-Identifier: Apache-2.0
"""The model families. To add one: its part in a file of its own, and its entry here."""
from weft.report.family import Family
from weft.report.language_model import language_model_part
from weft.report.transcoder import transcoder_part

FAMILIES = [
    Family("transcoder", "transcoders", transcoder_part, [
        ("validation NMSE (standardised)", ("validation", "nmse_standardised_mean")),
        ("training NMSE (standardised)", ("train", "nmse_standardised")),
        ("explained variance", ("validation", "explained_variance_mean")),
        ("L0", ("validation", "l0_mean")),
        ("loss recovered", ("replacement", "all_layers", "recovered_from_mean")),
        ("dead fraction", ("validation", "dead_fraction_mean")),
        ("recovered", ("recovery", "fraction"))]),
    Family("language_model", "language models", language_model_part, [
        ("validation loss", ("validation", "loss")),
        ("training loss", ("train", "loss")),
        ("perplexity", ("validation", "perplexity")),
        ("bits per byte", ("validation", "bits_per_byte"))])]


def family_of(facts):
    """None: the input of the run was not recorded, or is of no family."""
    return next((family for family in FAMILIES if isinstance(facts.of("input", family.table), dict)), None)
