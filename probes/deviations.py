"""Every deviation of a trainer's wiring that a probe or a report can name: one table.

    deviation("noise-on-teacher").sentence

A name is a promise: policies, baselines and people's notes refer to it. Which probe gives a name is in that probe's
entry (`parity.probes.table`). The sixteen kinds of difference between two traces have their own table,
`parity.diagnosis.records.MEANING`: what to do about one follows from where it begins, so each diagnosis states it.
`parity probes` lists both. Standard library only.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deviation:
    """One way in which a trainer or a trace departs from what it is declared to be."""

    name: str
    sentence: str
    """What is wrong, for a reader without the evidence."""
    do: str
    """Where to look, and what to change."""


_ROWS = (
    # noise
    (
        "noise-on-teacher",
        "noise reaches the state from which labels or teacher logits are made",
        "take the teacher's slice before noise is added, and add noise to the conditioning slices only",
    ),
    (
        "noise-undeclared",
        "noise enters fc though the recipe declares none",
        "remove it, or declare it under recipe.noise",
    ),
    (
        "noise-missing",
        "the declared noise never reaches fc",
        "look for a noise transform on another key, another split, or with std 0",
    ),
    (
        "noise-std",
        "the noise has another standard deviation than declared",
        "compare the formula: a uniform noise of half-width w has a deviation of w / sqrt(3)",
    ),
    (
        "noise-kind",
        "the noise has another distribution than declared",
        "declare what is drawn under recipe.noise.kind, or draw what is declared",
    ),
    (
        "noise-slices",
        "not every conditioning slice gets the declared noise",
        "add the noise to the whole fc input, after the slices are joined",
    ),
    (
        "noise-in-evaluation",
        "noise is on in evaluation",
        "switch it off outside training: validation and drafting are then measured on what is served",
    ),
    (
        "noise-shared",
        "one draw of noise is used in several places",
        "draw noise of the whole fc input's shape, for every step anew: a broadcast or a generator that starts "
        "again repeats it",
    ),
    (
        "noise-behind-fc",
        "the drafts move with the seed by more than fc's input does",
        "look for noise on fc's output, on the block's embeddings or on the draft layers, and for a dropout",
    ),
    (
        "noise-unseeded",
        "the same seed gives other noise",
        "draw from a generator that is seeded by (seed, epoch, sample)",
    ),
    # context
    (
        "mask-ignored",
        "the mask masks nothing: every block sees every state",
        "look at how the mask reaches attention: a bool mask that is added to the scores hides nothing",
    ),
    (
        "context-anchor",
        "a block sees the target's state of its own anchor token",
        "compare positions with < anchor: serving has that state only after the block was drafted",
    ),
    (
        "context-future",
        "a block sees states behind its anchor, which serving does not have",
        "compare positions with the block's anchor, not with each slot or with the end of the row",
    ),
    (
        "context-documents",
        "a block sees another document's states",
        "compare document ids in the mask of every layer, and where documents are joined",
    ),
    (
        "context-padding",
        "a block sees states of padding",
        "give padding a document of its own and mask it for everyone",
    ),
    (
        "context-missing",
        "a block does not see states that it should see",
        "look for a mask that leaves out prompts, first tokens or whole documents",
    ),
    (
        "context-edge",
        "the context of a block ends or begins at another token than declared",
        "compare the first and last position that the mask lets through",
    ),
    (
        "window-size",
        "a sliding layer sees another window than declared",
        "count who is inside: a window of W counted from the query takes in the query's own place",
    ),
    (
        "window-from",
        "a window is counted from another place than declared",
        "count it from each query as z-lab, SpecForge and vLLM do, or declare recipe.attention.window_from: anchor",
    ),
    (
        "window-ignored",
        "a sliding layer sees more than its window",
        "look whether the layer's kind reaches the mask",
    ),
    (
        "window-undeclared",
        "a layer that is declared full has a window",
        "declare the layer as sliding, or give it the full mask",
    ),
    (
        "within-block",
        "slots see other slots of their block than declared",
        "compare the causal flag with recipe.block.within, layer by layer",
    ),
    (
        "block-other",
        "a block sees another block",
        "give every block its own number in the mask",
    ),
    (
        "block-tokens",
        "tokens that are no anchors enter the blocks",
        "fill slots 1 and up with the mask token: serving does not know what follows",
    ),
    (
        "block-anchor",
        "a block does not see the token at its own anchor",
        "fill slot 0 with the anchor's token",
    ),
    (
        "block-positions",
        "the block's positions do not go on where the context ends",
        "slot k of a block at token a stands at position a + k",
    ),
    (
        "mask-token",
        "another embedding fills the slots than the declared mask token's",
        "compare the id that fills slots 1 and up with recipe.block.mask_token_id",
    ),
    (
        "rope-base",
        "rope turns with another base than configured",
        "look whether rope_theta and rope_parameters both reach the drafter",
    ),
    (
        "rope-part",
        "rope turns another share of each head than configured",
        "look whether partial_rotary_factor reaches the drafter: transformers' Qwen3 ignores it, vLLM does not",
    ),
    (
        "norm-epsilon",
        "norms use another epsilon than configured",
        "pass rms_norm_eps on to every norm",
    ),
    (
        "context-norm",
        "the conditioning states are not normed after fc",
        "apply hidden_norm to fc's output",
    ),
    (
        "drafter-not-recognised",
        "the step computes another function than the declared drafter, and no known one",
        "compare the drafter's code with the paper, layer by layer, on one block",
    ),
    # decode
    (
        "decode-positions",
        "inference gives the block other positions than training",
        "slot k of a block at token a stands at position a + k: look at how the cache's length becomes a position",
    ),
    (
        "decode-rope",
        "inference turns rope otherwise than training",
        "compare rope_theta and partial_rotary_factor of both, and which schema each of them reads",
    ),
    (
        "decode-context",
        "inference gives the block another context than training",
        "look at what is cropped from the cache and at the first and last state that is put in",
    ),
    (
        "decode-within",
        "slots see other slots of their block at inference than in training",
        "compare the causal flag, layer by layer",
    ),
    (
        "decode-window",
        "sliding layers see another window at inference than in training",
        "compare the window and whether it is counted from the query or from the anchor",
    ),
    (
        "decode-slices",
        "inference joins the conditioning slices in another order than training",
        "join them in the order of recipe.conditioning.layers on both sides",
    ),
    (
        "decode-embedding",
        "inference fills the block with other embeddings than training",
        "use the target's raw embedding rows on both sides, without its factor",
    ),
    (
        "decode-mask-token",
        "inference fills the slots with another mask token than training",
        "pass the same mask_token_id on, and save it with the checkpoint",
    ),
    (
        "decode-head",
        "inference uses another head than training",
        "use the same rows, in the same order, unscaled",
    ),
    (
        "decode-long",
        "inference departs from training at late positions",
        "look for a cache, a table of angles or a position that ends there",
    ),
    (
        "decode-training",
        "inference drafts with the declared drafter, and training computed another",
        "see what `context` says of the step",
    ),
    (
        "decode-not-recognised",
        "inference computes something else than training, and nothing known",
        "compare one block layer by layer: draft against the step, on the same states",
    ),
    (
        "recurrent-state",
        "after a rejection the text is no longer the target's: its caches keep what was refused",
        "put the recurrent and convolution states of linear-attention layers back, they cannot be cropped",
    ),
    (
        "verification",
        "drafting and verifying writes another text than the target",
        "accept only the longest prefix that equals the target's own choice, then add that choice",
    ),
    # frozen
    (
        "frozen-trains",
        "a parameter that the recipe freezes is trained",
        "switch requires_grad off, and leave it out of the optimizer: weight decay moves it without a gradient",
    ),
    (
        "trained-frozen",
        "parameters that should train are frozen",
        "switch requires_grad on, or name them under recipe.frozen",
    ),
    (
        "trained-without-gradient",
        "parameters that should train get no gradient",
        "look for a detach, a no_grad block or a branch that is never used",
    ),
    (
        "trained-not-in-optimizer",
        "parameters that should train are not in the optimizer",
        "build the optimizer after the model is complete, from all its parameters",
    ),
    (
        "trained-still",
        "parameters do not change in an optimizer step",
        "look for a copy that the optimizer updates instead, or a group with another learning rate",
    ),
    (
        "embed-differs",
        "the embedding is not the target's",
        "copy the target's rows after loading, and check what the loader left uninitialised",
    ),
    (
        "head-differs",
        "the head is not the target's",
        "copy the target's rows after loading; a tied target has no head of its own in its file",
    ),
    # resume
    (
        "run-not-deterministic",
        "the run is no function of its seed",
        "draw anchors and noise from generators that are seeded by (seed, epoch, sample), not from global ones",
    ),
    (
        "resume-restart",
        "an interrupted run begins again instead of going on",
        "look where the checkpoint is written and where it is looked for",
    ),
    (
        "resume-data",
        "a resumed run sees other data than the run that was not interrupted",
        "save the position within the epoch with the checkpoint, and the order's seed",
    ),
    (
        "resume-weights",
        "a resumed run has other weights than were trained",
        "save the weights that are trained, in their own precision, and load them all",
    ),
    (
        "resume-random",
        "a resumed run draws other anchors or noise",
        "make them depend on (seed, epoch, sample), or save the generators' states",
    ),
    (
        "resume-optimizer",
        "a resumed run goes on with another optimizer state, or another schedule",
        "save and load moments and step counters of every parameter",
    ),
    (
        "resume-schedule",
        "a resumed run has another learning rate",
        "save the schedule's step, or compute the rate from the number of steps done",
    ),
    (
        "resume-not-recognised",
        "a resumed run is another run",
        "log the rate and counts of the data (`run` may return records), and ask again",
    ),
    # export
    (
        "export-layer-ids",
        "the checkpoint names other conditioning layers than were trained with",
        "z-lab counts decoder layers from 0, speculators and vLLM write layer + 1; keep the order of fc's slices",
    ),
    (
        "export-mask-token",
        "the checkpoint names another mask token than was trained with",
        "write recipe.block.mask_token_id, also where a reader has a default",
    ),
    (
        "export-block-size",
        "the checkpoint names another block size than was trained with",
        "write B beside and inside dflash_config, and B - 1 as speculative_tokens",
    ),
    (
        "export-rope",
        "the checkpoint's rope is not the trained one for every reader",
        "write both schemas alike; z-lab's own package ignores partial_rotary_factor, vLLM applies it",
    ),
    (
        "export-attention",
        "the checkpoint's windows or causal flags are not the trained ones",
        "write layer_types, sliding_window with use_sliding_window, and is_causal where it is not the default",
    ),
    (
        "export-epsilon",
        "the checkpoint's norms are not the trained ones",
        "write rms_norm_eps",
    ),
    (
        "export-vocabulary",
        "the checkpoint maps draft ids to other tokens than were trained",
        "write t2d and d2t of the run that trained it; d2t holds offsets: target id = draft id + d2t[draft id]",
    ),
    (
        "export-weights",
        "the checkpoint's weights are not the trained ones",
        "write the live parameters, after the last step, under the reader's names",
    ),
    (
        "export-shared",
        "the checkpoint holds another copy of a tensor of the target's than training used",
        "write the target's own rows, or none",
    ),
    (
        "export-unreadable",
        "a reader does not take the checkpoint",
        "do what it says, and export again",
    ),
    (
        "export-not-recognised",
        "a reader computes something else from the checkpoint than training, and nothing known",
        "compare one block layer by layer: the reader against the step, on the same states",
    ),
    # tokens
    (
        "tokens-bos",
        "training or serving puts one more token at the beginning",
        "let either the template or the tokenizer add the first token: add_special_tokens=False on rendered text",
    ),
    (
        "tokens-cut",
        "control tokens of one side are cut into characters on the other",
        "tokenise rendered text with split_special_tokens=False, and with the target's own tokenizer",
    ),
    (
        "tokens-thinking",
        "training renders the beginning of an answer otherwise than the server's request",
        "compare enable_thinking and the empty think block of the template on both sides",
    ),
    (
        "tokens-template",
        "training renders conversations otherwise than the server",
        "use one chat template: look for a default system message, other roles or a copy of the template",
    ),
    (
        "tokens-text",
        "some texts have other ids in training than at the server",
        "leave the text as it is: no stripping, no case folding, no unicode normalisation before the tokenizer",
    ),
    (
        "tokens-mask",
        "what is trained on is not exactly the assistant's text",
        "compare the loss mask with {% generation %} marks of the template",
    ),
    (
        "tokens-end",
        "the token that ends the assistant's turn is not trained on",
        "let the loss mask take it in: the draft has to propose the end too",
    ),
    # loss
    (
        "loss-none",
        "no slot is trained: the loss has no gradient at the head's input",
        "look for a loss mask that is empty, an anchor that is dropped, or a detached loss",
    ),
    (
        "loss-unrecognised",
        "no known mixture of terms has this gradient at the head's input",
        "compare the head's rows, the labels and every term with the recipe; `labels` and `teacher` say more",
    ),
    (
        "loss-head",
        "the draft's logits are not made by the target's frozen head",
        "use the target's rows, unchanged and without gradient: serving drafts with them",
    ),
    (
        "loss-terms",
        "the terms of the loss have other shares than declared",
        "compare the terms and their factors with recipe.loss.terms",
    ),
    (
        "loss-smoothing",
        "the labels are smoothed",
        "look for label_smoothing in the cross-entropy; the recipe knows no such term",
    ),
    (
        "loss-label-source",
        "the hard labels come from elsewhere than declared",
        "compare recipe.labels with what cross-entropy is given: the data's tokens or the teacher's argmax",
    ),
    (
        "loss-temperature",
        "logits are divided by another temperature than declared",
        "compare recipe.loss.temperature with what both sides' logits are divided by",
    ),
    (
        "loss-temperature-squared",
        "a soft term is multiplied by the temperature squared, as in distillation, which is not declared",
        "take the factor out, or multiply the term's factor under recipe.loss.terms by it",
    ),
    (
        "loss-weights",
        "the slots of a block are weighted by another law than declared",
        "compare recipe.loss.weights with the weights that the loss is multiplied with",
    ),
    (
        "loss-streak",
        "a slot's weight depends on which slots the draft got right",
        "take the streak out of the weights: the recipe declares plain position weights",
    ),
    (
        "loss-weights-attached",
        "the gradient flows through the weights too",
        "compute the weights without gradient (`torch.no_grad`, `detach`)",
    ),
    (
        "loss-gamma",
        "the position weights decay with another gamma than declared",
        "compare recipe.loss.weights.gamma; the paper's 7, 5 and 4 belong to blocks of 16, 10 and 8",
    ),
    (
        "loss-alpha",
        "D-PACE smooths its confidence with another alpha than declared",
        "compare recipe.loss.weights.alpha",
    ),
    (
        "loss-slot0",
        "slot 0 is trained though its token is the clean anchor",
        "mask slot 0 out of the loss",
    ),
    (
        "loss-reduction",
        "the weighted sum is divided by something else than declared",
        "compare recipe.loss.reduction; every other divisor scales the learning rate, row by row",
    ),
    # labels
    (
        "label-unrecognised",
        "the labels cannot be read from the gradient",
        "compare the loss and the head's rows with the recipe first: `loss` and `teacher` say more",
    ),
    (
        "label-offset",
        "slots are trained on the label of another slot",
        "slot k of a block at token a is trained on token a + k, which state a + k - 1 predicts",
    ),
    (
        "label-source",
        "labels come from elsewhere than declared",
        "compare recipe.labels with what the loss is given: the data's tokens or the teacher's argmax",
    ),
    (
        "label-documents",
        "labels cross into another document",
        "end a block's supervision where its anchor's document ends, or begin every document with a masked prompt",
    ),
    (
        "label-padding",
        "padding is trained on",
        "mask slots behind the row's last token",
    ),
    (
        "label-prompt",
        "slots are trained on tokens that the loss mask takes out",
        "gather the loss mask at anchor + slot, as the labels are",
    ),
    (
        "label-holes",
        "slots behind a hole in the loss mask are trained otherwise than declared",
        "compare recipe.block.past_holes with how the loss mask is applied",
    ),
    (
        "label-missing",
        "slots that should be trained get no gradient",
        "look for a mask that is shifted, cut short or applied twice",
    ),
    (
        "label-vocabulary",
        "labels are draft ids of other tokens than declared",
        "map target ids by t2d / d2t before they become labels, and back by the same map",
    ),
    (
        "label-unknown",
        "labels are tokens that stand nowhere near their slots",
        "look for a gather along the wrong axis, or ids of another row",
    ),
    # inputs
    (
        "fc-teacher",
        "the slice that makes the labels is fed to fc",
        "feed fc the conditioning slices only: serving knows the last state of a token no sooner than its label",
    ),
    (
        "fc-layers",
        "other layers than the declared ones are fed to fc",
        "compare recipe.conditioning.layers with the slices that are joined for fc",
    ),
    (
        "fc-order",
        "fc's slices stand in another order than declared",
        "join the slices in the order of recipe.conditioning.layers, in training and in serving",
    ),
    (
        "fc-dead",
        "a slice enters fc and the drafts do not depend on it",
        "look for columns of fc.weight that are zero, or a slice that is detached, masked or multiplied by 0",
    ),
    (
        "fc-altered",
        "what enters fc is not what was captured",
        "look for a norm, a scale or a cast between the captured slices and fc",
    ),
    (
        "labels-from-conditioning",
        "labels move with a conditioning slice",
        "take the teacher's state from its own slice: look at which index splits the captured tensor",
    ),
    (
        "labels-without-teacher",
        "labels do not move with the teacher's slice",
        "look where labels come from: the recipe declares the teacher's state",
    ),
    (
        "labels-undeclared-teacher",
        "labels move with a captured state though the recipe declares the data's tokens",
        "declare recipe.labels and recipe.teacher as they are, or train on the data's tokens",
    ),
    (
        "layer-shift",
        "the capture is one layer off",
        "mind the convention: entry i + 1 of hidden_states is the output of decoder layer i",
    ),
    (
        "layer-wrong",
        "the capture delivers other layers than declared",
        "compare the layer ids of the capture with recipe.conditioning.layers",
    ),
    (
        "capture-order",
        "captured slices are exchanged",
        "deliver the slices in the order of their names",
    ),
    (
        "capture-norm",
        "the capture is on the other side of the final norm than it is called",
        "compare recipe.teacher.norm: transformers' last hidden state is after the norm, vLLM's before it",
    ),
    (
        "capture-rows",
        "the capture is one token off",
        "look for a roll, a dropped first token or a shifted label in the capture",
    ),
    (
        "capture-differs",
        "a captured slice is no state of the target",
        "compare the capture with the target in `parity compare`: loader, backend, dtype, padding, packing",
    ),
    # teacher
    (
        "teacher-norm",
        "the teacher's state goes through the final norm otherwise than declared",
        "apply the target's own final norm once; mind weights stored as w for 1 + w (Gemma, Qwen3.5, Qwen3-Next)",
    ),
    (
        "teacher-shift",
        "the teacher's logits are those of another token",
        "slot k of a block at token a is predicted by the state of token a + k - 1",
    ),
    (
        "teacher-layer",
        "the teacher's logits are made from another state than declared",
        "compare recipe.teacher.state with the slice that the teacher is split from",
    ),
    (
        "teacher-head",
        "the teacher's head is not the target's",
        "load the target's lm_head into the teacher; tied heads are stored under the embedding's name",
    ),
    (
        "teacher-vocabulary",
        "the teacher's logits stand in another order than the draft's vocabulary",
        "use one map, t2d and d2t of the same file, for the teacher's rows, the draft's rows and the data",
    ),
    (
        "teacher-differs",
        "the teacher's logits are not the target's, for no known reason",
        "compare states in `parity compare`, then norm and head by hand on one token",
    ),
    # coverage
    (
        "anchors-padding",
        "anchors stand on padding",
        "draw among tokens that belong to a document",
    ),
    (
        "anchors-masked",
        "anchors stand on tokens that are not trained on",
        "draw among supervised tokens: at inference a block begins at a token of the answer",
    ),
    (
        "anchors-repeated",
        "an anchor is drawn more than once",
        "draw without replacement, or count such blocks once",
    ),
    (
        "anchors-unseeded",
        "the same seed and epoch draw other anchors",
        "draw from a generator that is seeded by (seed, epoch, sample)",
    ),
    (
        "anchors-frozen",
        "anchors are never drawn anew",
        "let the epoch enter the draw: a fixed set trains on a part of the data only",
    ),
    (
        "anchors-starved",
        "documents get fewer anchors than declared",
        "give every document its own budget: one for a packed row starves them (speculators#1071)",
    ),
    (
        "anchors-row-budget",
        "anchors are budgeted by the row and not by the document",
        "give every document its own budget, or see that a row's is as many times larger as it holds documents",
    ),
    (
        "anchors-budget",
        "documents get more anchors than declared",
        "compare recipe.block.anchors and share with the draw",
    ),
    (
        "anchors-uneven",
        "anchors do not reach all of a document",
        "draw evenly among the candidates: look for a sorted list that is cut short",
    ),
    # shapes
    (
        "step-not-finite",
        "a tensor of the step holds values that are not finite",
        "look for weights never loaded (speculators fills them with NaN), overflow, or a softmax over nothing",
    ),
    (
        "states-not-finite",
        "captured states hold values that are not finite",
        "compare the capture with the target in `parity compare`",
    ),
    (
        "states-zero",
        "captured states of tokens are zero",
        "look at what the engine's cache hands out: hybrid targets have pages of two sizes (vllm#46301)",
    ),
    (
        "states-constant",
        "captured states of tokens are one value",
        "look for a buffer that was never written",
    ),
    (
        "states-repeated",
        "captured states of a token are another token's",
        "look for a block that is written twice, or a view that is overwritten",
    ),
    (
        "states-dtype",
        "captured states have another precision than declared",
        "compare recipe.target.dtype with how states are captured and stored",
    ),
    (
        "fc-width",
        "fc is fed another number of features than the declared slices have",
        "compare recipe.conditioning.layers with the slices that are joined for fc",
    ),
    (
        "fc-rounded",
        "what enters fc was rounded",
        "look for a cast between the captured states and fc",
    ),
    (
        "labels-range",
        "labels lie outside the head's rows",
        "map target ids into the draft's vocabulary",
    ),
)
"""(name, sentence, do), in the order of the probes."""

DEVIATIONS = {name: Deviation(name, sentence, do) for name, sentence, do in _ROWS}
"""Name -> its row."""


def deviation(name: str) -> Deviation:
    """Return the row of that name. Raises KeyError for a name that is not in the table."""
    return DEVIATIONS[name]
