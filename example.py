from paged_jax import LLM, SamplingParams

llm = LLM("smollm2-135m-instruct", max_num_seqs=4)
greedy = SamplingParams(temperature=0.0, max_tokens=24, stop="\n")

for output in llm.generate(["The capital of France is", "Water boils at"], greedy):
    print(output.prompt + output.outputs[0].text)

[answer] = llm.chat([{"role": "user", "content": "What is the capital of France?"}], greedy)
print(answer.outputs[0].text)
