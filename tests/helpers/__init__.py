"""What tests share: models, data, runs, processes and stand-ins for the world outside. Import as `helpers.NAME`.

What only one folder of tests needs lies in that folder:
    distributed/       `engine_cases`: three steps under any engine; `two_ranks`: a function on two ranks
    interop/           `documented/`: commands, configs and scripts of other tools as their pages have them, and what
                       each comes to here; `facts/`: the settings of LLaMA-Factory and DeepSpeed-Chat
    models/            `conftest`: tiny models that all its tests share
    system/            `odd_files`: links and pipes that may lie under a name the program writes to
    faults/, equality/, conformance/

Models
    tiny_models        a tiny Llama and word tokenizers in the real layout, built in milliseconds: the usual base
    token_files        tokenised files from arrays
    toy_model          a model that trains in microseconds, for tests of the training engine
    zoo                one tiny random model per family (`zoo_templates`, `zoo_tokenizers`: their text sides)
    zoo_modern         tiny models of the other causal families that transformers has
    zoo_adapters       adapters of the zoo's models, moved off their start
    stored_forms       models whose files hold MXFP4, FP8 or GPTQ
    experts            tiny mixtures of experts, and what a layer of theirs computes
    wrappers           language models inside a checkpoint that also sees
    seeing             a tiny model that sees, with its processor and pictures; `seeing_families`: of other families
    architectures      config.json of every family, tiny and as published
    model_layouts      model folders as JSON alone, enough to plan

Data
    growing_records    records whose answers differ in length
    nan_examples       examples whose loss is NaN, whatever the weights are
    conversations      dialogues that every chat template is tried with (`golden_templates` writes what they make of it)
    converted_records  records of a file as conversations, all at once
    spike_curves       made-up gradient norms, and which of their steps are spikes
    secret_formats     what keys and passwords look like

Configs, plans and runs
    configs            a valid config with its files, and hypothesis strategies after the JSON Schema
    plans              plans written by hand
    run_folders        run folders written by hand; adapter_runs: finished adapters written by hand
    trained_runs       a tiny model and eight records trained through the command line
    rollback_runs      runs of every method in which some steps' loss is NaN
    doctor_runs        runs with nothing wrong, and with something planted for doctor
    tune_trials        trials of `surefoot tune`, made up

Processes
    fork_server        commands in fresh processes without the imports, killed wherever a test wants (`run_position`)
    forked_command     a command and the ranks it starts, forked likewise (`preloaded_imports`)
    python_on_path     `python` and `surefoot` for shell scripts under test
    planted_crashes    steps that end their process

Outside
    hub_stub           the model hub, on this machine
    http_stub          a server that answers as a test says
    board_server       a board that serves while a block runs
    doc_pages          what README.md and docs/*.md quote
    benchmark_programs records, and words of the command line, for the programs of benchmarks/

Assertions
    faults             the faults that a block must raise: code, whole place, number of faults, values; never wording

Speed
    tiers              which cases of a matrix `make test` runs; the rest is for `make test-long`
    built_once         models built once in a process
    blank_pictures     an empty picture for each curve of a run
    no_fsync           flushes that return at once
"""
