# SPDX-License-Identifier: Apache-2.0
"""What the page shows of a language model: validation, the model, and the answers of polychromic training."""
import math

from weft import charts
from weft.page import Section
from weft.report.family import MOST_ROWS, CurveStyle, FamilyPart
from weft.report.privacy import privacy_sections
from weft.text import joined, member, number, printable, short_number, text_of, whole

# Prompts and answers that are shown.
PROMPTS, ANSWERS, LONGEST = 4, 8, 600
MEASURES = (("reward", "mean reward"), ("diversity", "semantic diversity"), ("distinct_2", "distinct-2"), ("self_bleu", "self-BLEU"),
            ("objective", "objective of sets"), ("answer_tokens", "tokens of an answer"), ("empty_answers", "share of empty answers"))
SHARES = (("reward", "mean reward"), ("pass_1", "pass@1"), ("pass_8", "pass@8"), ("pass_64", "pass@64"))
DIVERSITIES = (("diversity", "semantic diversity"), ("distinct_2", "distinct-2"), ("unique_answers", "different answers"))
STAGES = ("generate", "embed", "reward", "diversity and advantage", "policy backward")


def _validation_of(facts):
    """Measures on validation data: the run's own, else those of evaluation.json."""
    own = facts.of("result", "validation")
    return own if isinstance(own, dict) else member(facts.evaluation, "validation")


def _curves(facts, validation):
    loss = CurveStyle("loss", "Training loss", "nats per token", "Mean over the predictions of each logged step, before its update.")
    if math.isfinite(level := number(member(validation, "loss"))):
        loss.level, loss.level_name = level, "validation"
    curves = [loss,
              CurveStyle("validation.loss", "Validation loss", "nats per token",
                         "Mean over all predictions of the validation data (log.evaluate_every)."),
              CurveStyle("gradient_norm", "Gradient norm", "norm", "Of the gradients of all parameters together, before clipping.",
                         from_zero=True)]
    if "answers.diversity" in facts.curves.metrics:
        drawn = "Mean over the answers since the last record, drawn for training."
        fixed = "The evaluation prompts, with the same random numbers each time."
        curves += [CurveStyle("validation.diversity", "Semantic diversity", "mean of 1 - cosine", fixed),
                   CurveStyle("validation.reward", "Reward", "mean reward", fixed),
                   CurveStyle("validation.distinct_2", "distinct-2", "different bigrams / bigrams", fixed),
                   CurveStyle("answers.diversity", "Semantic diversity in training", "mean of 1 - cosine", drawn),
                   CurveStyle("answers.reward", "Reward in training", "mean reward", drawn)]
    return curves


def _tiles(facts, validation):
    tiles = [(member(validation, "loss"), "validation loss, nats per token"), (member(validation, "perplexity"), "perplexity"),
             (member(validation, "bits_per_byte"), "bits per byte")]
    if not isinstance(validation, dict):
        tiles.append((facts.of("result", "train", "loss"), "training loss, nats per token"))
    tiles.append((facts.of("result", "privacy", "epsilon"), "epsilon"))
    return [(short_number(number(value)), name) for value, name in tiles if math.isfinite(number(value))]


def _samples(section, step, when):
    samples = member(step, "samples")
    if not isinstance(samples, list) or not samples:
        return
    section.begin_block()
    section.paragraph(f"Answers {when} the training:")
    text = ""
    for sample in samples[:PROMPTS]:
        text += f"> {printable(text_of(member(sample, 'prompt')), LONGEST)}\n"
        answers = member(sample, "answers")
        for i, answer in enumerate(answers[:ANSWERS] if isinstance(answers, list) else []):
            text += f"  {i + 1}. {printable(text_of(answer), LONGEST)}\n"
    section.listing(text)
    section.end_block()


def _answers_section(facts):
    """The diversity of answers, before and after; None for other runs."""
    answers = facts.of("result", "answers")
    if not isinstance(answers, dict):
        return None
    section = Section("Diversity of answers")
    before, after = answers.get("before"), answers.get("after")
    section.paragraph(f"The same prompts and random numbers before the training and after step {whole(number(member(after, 'step')))}. "
                      "Diversity is the mean of 1 - cosine over pairs of answers to a prompt, embedded by the initial model.")
    rows = []
    for key, name in MEASURES:
        first, last = number(member(before, key)), number(member(after, key))
        change = f"{100 * (last / first - 1):+.1f} %" if math.isfinite(first) and math.isfinite(last) and first != 0 else ""
        rows.append([name, *(f"{value:.4f}" if math.isfinite(value) else "not known" for value in (first, last)), change])
    section.table(["measure", "before the training", "after", "change"], rows, 1)
    timings = facts.of("timings")
    if isinstance(timings, dict):
        seconds = {name: number(member(phase, "mean")) for name, phase in timings.items()}
        total = sum(value for value in seconds.values() if math.isfinite(value))
        rows = [[stage, f"{seconds[stage]:.3g}", f"{100 * seconds[stage] / total:.1f} %"] for stage in STAGES
                if math.isfinite(seconds.get(stage, math.nan)) and total > 0]
        if rows:
            section.table(["stage", "seconds", "of all phases"], rows, 1)
    section.begin_columns()
    _samples(section, before, "before")
    _samples(section, after, "after")
    section.end_columns()
    return section


def _checkpoints_section(facts):
    """answers.json of `weft lm evaluate --answers`: a row for each checkpoint, curves, reward against diversity; None without it."""
    records = member(facts.answers, "checkpoints")
    measured = [(number(member(one, "step")), one) for one in records[:MOST_ROWS]] if isinstance(records, list) else []
    measured = sorted((one for one in measured if math.isfinite(one[0])), key=lambda one: one[0])
    if not measured:
        return None
    section, steps = Section("Answers of the checkpoints"), [step for step, _ in measured]
    section.paragraph(f"{whole(number(facts.answers.get('samples')))} answers to each prompt of {printable(text_of(facts.answers.get('prompts')), LONGEST)}, "
                      "from answers.json. pass@k: probability that of k answers at least one has the reward 1 or more.")
    values = {key: [number(member(one, "answers", key)) for _, one in measured] for key, _ in (*SHARES, *DIVERSITIES)}
    known = [(key, name) for key, name in (*SHARES, *DIVERSITIES) if any(map(math.isfinite, values[key]))]
    section.table(["step", *(name for _, name in known)],
                  [[whole(step), *(f"{values[key][i]:.4f}" if math.isfinite(values[key][i]) else "-" for key, _ in known)]
                   for i, step in enumerate(steps)], 0)
    if len(measured) < 2:
        return section
    section.begin_columns()
    for title, group in (("Reward and right answers", SHARES), ("Diversity", DIVERSITIES)):
        if lines := [(name, steps, values[key]) for key, name in group if (key, name) in known]:
            section.figure(title, charts.overlay("step", "mean over the prompts", lines), "The same prompts and random numbers for each checkpoint.")
    chosen = next((one for one in DIVERSITIES if one in known), None)
    if chosen and SHARES[0] in known:
        points = [(f"step {whole(step)}", [values[chosen[0]][i]], [values["reward"][i]]) for i, step in enumerate(steps)]
        drawn = [points[i * (len(points) - 1) // (shown - 1)] for shown in [min(len(points), len(charts.PALETTE))] for i in range(shown)]
        section.figure("Reward against diversity", charts.overlay(chosen[1], "mean reward", drawn, steps=False),
                       "A point for each checkpoint: further up and to the right is better.")
    section.end_columns()
    return section


def _model_section(facts, validation):
    section = Section("Model")
    if isinstance(validation, dict):
        section.paragraph(f"Validation: {whole(number(validation.get('tokens')))} predictions, each token of the text once.")
    else:
        section.paragraph("No validation measures: the run did not finish, or has no validation data. weft lm evaluate RUN --text FILE "
                          "--output RUN adds them to this page.", "missing")
    settings = facts.of("input", "language_model")
    rows = [(key, text_of(value)) for key, value in settings.items() if text_of(value)][:MOST_ROWS]
    if rows:
        section.table(["language_model", "value"], rows, 1)
    return section


def _about(facts):
    """"language model (llama), data data/text.txt, 6 layers, d_model 384, learning rate 0.001"."""
    preset = facts.text("input", "language_model", "preset")
    return joined(["language model" + (f" ({preset})" if preset else ""),
                   "private" if facts.of("input", "privacy", "enabled") is True else "",
                   "polychromic" if isinstance(facts.of("result", "answers"), dict) else "",
                   facts.setting("data", "train", "data"), facts.text("input", "language_model", "layers") + " layers",
                   facts.setting("language_model", "d_model", "d_model"), facts.setting("optimizer", "learning_rate", "learning rate")])


def language_model_part(facts, with_sections=True):
    validation = _validation_of(facts)
    sections = [*privacy_sections(facts), _answers_section(facts), _checkpoints_section(facts),
                _model_section(facts, validation)] if with_sections else []
    return FamilyPart(_about(facts), _curves(facts, validation), _tiles(facts, validation), [one for one in sections if one])
