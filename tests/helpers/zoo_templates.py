"""Chat templates that put out what the published ones of each family put out, written anew and as short as that allows.

Left out are branches for old message layouts (a tool call without `function`), images and built-in tools.
"""

from __future__ import annotations

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
