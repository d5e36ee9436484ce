"""Chat templates with the same output as the published ones of each family, rewritten and as short as possible.

Without branches for old message layouts (a tool call without `function`), images and built-in tools.
"""

LLAMA2 = r"""
{%- if messages[0]['role'] == 'system' %}
    {%- set turns = messages[1:] %}
    {%- set system = messages[0]['content'] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- for turn in turns %}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if turn['role'] == 'user' %}
        {{- bos_token + '[INST] ' }}
        {%- if loop.first and system is defined %}
            {{- ('<<SYS>>\n' + system + '\n<</SYS>>\n\n' + turn['content']) | trim }}
        {%- else %}
            {{- turn['content'] | trim }}
        {%- endif %}
        {{- ' [/INST]' }}
    {%- else %}
        {{- ' ' + turn['content'] | trim + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""

LLAMA3 = r"""
{%- for message in messages %}
    {%- if loop.first %}
        {{- bos_token }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

LLAMA31 = r"""
{{- bos_token }}
{%- set system = '' %}
{%- set turns = messages %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set turns = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}
    {{- 'Environment: ipython\n' }}
{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: ' + (date_string or '26 Jul 2024') + '\n\n' }}
{{- system + '<|eot_id|>' }}
{%- if tools %}
    {%- set first = turns[0]['content'] | trim %}
    {%- set turns = turns[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' }}
    {{- 'Given the following functions, please respond with a JSON for a function call ' }}
    {{- 'with its proper arguments that best answers the given prompt.\n\n' }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
    {{- 'Do not use variables.\n\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) + '\n\n' }}
    {%- endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for turn in turns %}
    {%- if turn['role'] in ('tool', 'ipython') %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {{- turn['content'] | tojson + '<|eot_id|>' }}
    {%- elif turn['tool_calls'] %}
        {%- if turn['tool_calls'] | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = turn['tool_calls'][0]['function'] %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + call['name'] + '", "parameters": ' + call['arguments'] | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + turn['role'] + '<|end_header_id|>\n\n' + turn['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

# The first form: [INST] is text, a system message is refused.
MISTRAL_V01 = r"""
{{- bos_token }}
{%- for turn in messages %}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if turn['role'] == 'user' %}
        {{- '[INST] ' + turn['content'] + ' [/INST]' }}
    {%- else %}
        {{- turn['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# v0.3: the system text stands in the last user turn, and so do the tools.
MISTRAL_V03 = r"""
{%- set turns = messages %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- endif %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for turn in turns %}
    {%- if turn['role'] == 'user' %}
        {%- if tools and turn == users[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {{- tool | tojson + ('' if loop.last else ', ') }}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system is defined %}
            {{- '[INST] ' + system + '\n\n' + turn['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + turn['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif turn['tool_calls'] %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in turn['tool_calls'] %}
            {%- if call['id'] is not defined or call['id'] | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- (call['function'] | tojson)[:-1] + ', "id": "' + call['id'] + '"}' + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif turn['role'] == 'assistant' %}
        {{- ' ' + turn['content'] | trim + eos_token }}
    {%- elif turn['role'] in ('tool', 'tool_results') %}
        {{- '[TOOL_RESULTS] {"content": ' + turn['content'] | string + ', ' }}
        {{- '"call_id": "' + turn['tool_call_id'] + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""

_QWEN_TOOLS = r"""
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + tool | tojson }}
    {%- endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within ' }}
    {{- '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}' }}
    {{- '\n</tool_call><|im_end|>\n' }}
"""
_QWEN_CALLS = r"""
        {%- for call in message.tool_calls %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (ARGUMENTS) + '}\n</tool_call>' }}
            {%- if not loop.last %}
                {{- '\n' }}
            {%- endif %}
        {%- endfor %}
"""
_QWEN_RESULT = r"""
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
"""

QWEN25 = (
    r"""
{%- set default = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}
{%- set system = messages[0].content if messages[0].role == 'system' else default %}
{{- '<|im_start|>system\n' + system }}
{%- if tools %}
    {{- '\n\n' }}"""
    + _QWEN_TOOLS
    + r"""
{%- else %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}"""
    + _QWEN_RESULT
    + r"""
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant\n' + (message.content + '\n' if message.content else '') }}"""
    + _QWEN_CALLS.replace("ARGUMENTS", "call.function.arguments | tojson")
    + r"""
        {{- '<|im_end|>\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
)

_RAW_IF_TEXT = "call.function.arguments if call.function.arguments is string else call.function.arguments | tojson"

# Thoughts stand only in answers after the last question; an answer at the very end always has a thought, if empty.
QWEN3 = (
    r"""
{%- if tools %}
    {{- '<|im_start|>system\n' + (messages[0].content + '\n\n' if messages[0].role == 'system' else '') }}"""
    + _QWEN_TOOLS
    + r"""
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set question = namespace(at=messages | length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set question.at = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}"""
    + _QWEN_RESULT
    + r"""
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > question.at and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- if message.tool_calls and content %}
            {{- '\n' }}
        {%- endif %}"""
    + _QWEN_CALLS.replace("ARGUMENTS", _RAW_IF_TEXT)
    + r"""
        {{- '<|im_end|>\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
)

# Ends with EOS where no answer is asked for.
PHI3 = r"""
{%- for message in messages %}
    {%- if message['role'] in ('system', 'user', 'assistant') %}
        {{- '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|assistant|>\n' if add_generation_prompt else eos_token }}
"""

_GEMMA_TURNS = r"""
{%- for turn in turns %}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if turn['role'] == 'assistant' else turn['role']) + '\n' }}
    {{- (prefix if loop.first else '') + turn['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\n' }}
{%- endif %}
"""

GEMMA2 = (
    r"""
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- set turns, prefix = messages, '' %}"""
    + _GEMMA_TURNS
)

# Gemma 3 puts the system text in front of the first user turn.
GEMMA3 = (
    r"""
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set turns, prefix = messages[1:], messages[0]['content'] + '\n\n' %}
{%- else %}
    {%- set turns, prefix = messages, '' %}
{%- endif %}"""
    + _GEMMA_TURNS
)


# GLM 4.5: nothing ends an answer but the token that begins the next turn. Thoughts stand only behind the last question.
GLM4 = r"""
{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(ensure_ascii=False) + '\n' }}
    {%- endfor %}
    {{- '</tools>\n\nFor each function call, output the function name and arguments within the following XML format:' }}
    {{- '\n<tool_call>{function-name}\n' }}
    {%- for number in (1, 2) %}
        {{- '<arg_key>{arg-key-' ~ number ~ '}</arg_key>\n<arg_value>{arg-value-' ~ number ~ '}</arg_value>\n' }}
    {%- endfor %}
    {{- '...\n</tool_call>' }}
{%- endif %}
{%- set last = namespace(question=-1) %}
{%- for message in messages if message.role == 'user' %}
    {%- set last.question = messages.index(message) %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|observation|>' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|assistant|>\n<think>' + (thought.strip() if loop.index0 > last.question else '') + '</think>' }}
        {{- '\n' + content.strip() if content.strip() }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>' + call.function.name + '\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {%- set value = value if value is string else value | tojson(ensure_ascii=False) %}
                {{- '<arg_key>' + key + '</arg_key>\n<arg_value>' + value + '</arg_value>\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- else %}
        {{- ('<|user|>' if message.role == 'user' else '<|system|>') + '\n' + message.content }}
    {%- endif %}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt }}
"""

# Thoughts are left out of every answer, and definitions of tools altogether; arguments of a call must be text.
DEEPSEEK = r"""
{{- bos_token }}
{%- for message in messages if message.role == 'system' %}
    {{- message.content }}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<｜User｜>' + message.content }}
    {%- elif message.tool_calls %}
        {{- '<｜Assistant｜>' + message.content + '<｜tool▁calls▁begin｜>' }}
        {%- for call in message.tool_calls %}
            {{- '\n' if not loop.first }}
            {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}
            {{- '\n```json\n' + call.function.arguments + '\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜>' + message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{{- '<｜Assistant｜>' if add_generation_prompt }}
"""
DEEPSEEK_R1 = DEEPSEEK.replace("'<｜Assistant｜>' if add", "'<｜Assistant｜><think>\\n' if add")

# Harmony, tools without nested objects. <|return|> ends the newest answer alone, and thoughts stand in it alone.
GPT_OSS = r"""
{%- macro kind(about) -%}
    {%- if about.enum -%}
        {{- '"' + about.enum | join('" | "') + '"' }}
    {%- elif about.type == 'array' -%}
        {{- kind(about['items']) + '[]' }}
    {%- else -%}
        {{- 'number' if about.type == 'integer' else about.type }}
    {%- endif -%}
{%- endmacro -%}
{{- '<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n' }}
{{- 'Knowledge cutoff: 2024-06\nCurrent date: ' + strftime_now('%Y-%m-%d') + '\n\nReasoning: medium\n\n' }}
{{- '# Valid channels: analysis, commentary, final. Channel must be included for every message.' }}
{{- "\nCalls to these tools must go to the commentary channel: 'functions'." if tools }}
{{- '<|end|>' }}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if system or tools %}
    {{- '<|start|>developer<|message|>' }}
    {{- '# Instructions\n\n' + system + '\n\n' if system }}
    {%- if tools %}
        {{- '# Tools\n\n## functions\n\nnamespace functions {\n\n' }}
        {%- for tool in tools %}
            {%- set tool = tool.function %}
            {{- '// ' + tool.description + '\ntype ' + tool.name + ' = (_: {\n' }}
            {%- for name, about in tool.parameters.properties.items() %}
                {{- '// ' + about.description + '\n' if about.description }}
                {{- name + ('' if name in (tool.parameters.required or []) else '?') + ': ' + kind(about) + ',\n' }}
            {%- endfor %}
            {{- '}) => any;\n\n' }}
        {%- endfor %}
        {{- '} // namespace functions' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + message.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- elif message.tool_calls %}
        {%- set thought = message.content or message.thinking %}
        {%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') %}
        {%- if thought and not later | rejectattr('tool_calls') | list %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {%- set newest = loop.last and not add_generation_prompt %}
        {%- if newest and message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if newest else '<|end|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|start|>assistant' if add_generation_prompt }}
"""
