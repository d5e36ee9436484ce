"""Shared test code: models, data, runs, processes and stand-ins for external services. Import as `helpers.NAME`.

Code that only one folder of tests needs is in that folder:
    distributed/       `engine_cases`: three steps under any engine; `two_ranks`: a function on two ranks
    interop/           `documented/`: commands, configs and scripts from the pages of other tools, and what each
                       becomes here; `facts/`: the settings of LLaMA-Factory and DeepSpeed-Chat
    models/            `conftest`: tiny models that all its tests share
    system/            `odd_files`: links and pipes in place of a file that the program writes
    faults/, equality/, conformance/

Models
    tiny_models        a tiny Llama and word tokenizers with the layout of real ones, the usual base
    token_files        tokenized files from arrays
    toy_model          a model that trains in microseconds, for tests of the training engine
    zoo                one tiny random model per family (`zoo_templates`, `zoo_tokenizers`: their text sides)
    zoo_modern         tiny models of the other causal families that transformers has
    zoo_adapters       adapters of the zoo's models with non-zero weights
    stored_forms       models with quantized files: MXFP4, FP8, GPTQ, AWQ, compressed-tensors
    experts            tiny mixtures of experts, and the reference computation of a layer
    wrappers           language models inside a vision-language checkpoint
    seeing             a tiny vision-language model, with processor and pictures; `seeing_families`: other families
    architectures      config.json of every family, tiny and as published
    model_layouts      model folders in JSON only, enough to plan

Data
    growing_records    records whose answers differ in length
    nan_examples       examples whose loss is NaN regardless of the weights
    conversations      dialogues to test every chat template with (`golden_templates` writes the results)
    converted_records  records of a file, converted to conversations
    spike_curves       synthetic gradient norms, and their spikes
    secret_formats     formats of keys and passwords

Configs, plans and runs
    configs            a valid config with its files, and hypothesis strategies after the JSON Schema
    plans              handwritten plans
    run_folders        handwritten run folders; adapter_runs: handwritten finished adapters
    trained_runs       a tiny model and eight records trained through the command line
    rollback_runs      runs of every method in which some steps have a NaN loss
    doctor_runs        runs without problems, and with planted ones for doctor
    tune_trials        synthetic trials of `surefoot tune`

Processes
    fork_server        commands in fresh processes without import time, killed at chosen places (`run_position`)
    forked_command     a command and its ranks, forked likewise (`preloaded_imports`)
    python_on_path     `python` and `surefoot` for shell scripts under test
    planted_crashes    steps that crash their process
    killed             runs that are killed in one call of a function, in this process

External services
    hub_stub           a local model hub
    http_stub          a server that answers as a test specifies
    board_server       a board that serves while a block runs
    doc_pages          quotes of README.md and docs/*.md
    benchmark_programs records and arguments for the programs of benchmarks/

Assertions
    faults             expected faults: code, place, number of faults, values; not wording

Speed
    tiers              which cases of a matrix `make test` runs; `make test-long` runs all
    built_once         models built once per process
    blank_pictures     empty pictures in place of a run's plots
    unlaid_tables      tables in run.log as one line a row
    no_fsync           flushes that return immediately
"""
