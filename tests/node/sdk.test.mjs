// OpenAI's Node SDK, unmodified, against the server at SERVELITE_URL (started by test_node_sdk.py).

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.SERVELITE_URL}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const ANSWER = "The capital of France is Paris.";
const PROMPT = "The capital of France is";
const greedy = { model: "demo", temperature: 0 };

async function all(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

test("chat", async () => {
  const answer = await client.chat.completions.create({ ...greedy, messages });
  assert.equal(answer.object, "chat.completion");
  assert.deepEqual(
    answer.choices.map((choice) => [choice.message.role, choice.message.content, choice.finish_reason]),
    [["assistant", ANSWER, "stop"]],
  );
  assert.equal(answer.usage.prompt_tokens, 37);
  assert.equal(answer.usage.completion_tokens, 8);
});

test("chat, streaming: role, text, finish, usage", async () => {
  const options = { stream: true, stream_options: { include_usage: true } };
  const chunks = await all(await client.chat.completions.create({ ...greedy, messages, ...options }));
  assert.deepEqual(chunks[0].choices[0].delta, { role: "assistant", content: "" });
  assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), ANSWER);
  assert.deepEqual(chunks.at(-2).choices[0].delta, {});
  assert.equal(chunks.at(-2).choices[0].finish_reason, "stop");
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.equal(chunks.at(-1).usage.completion_tokens, 8);
  assert.ok(chunks.slice(0, -1).every((chunk) => chunk.usage === null));
});

test("a stream on the wire ends with [DONE]", async () => {
  const body = JSON.stringify({ ...greedy, messages, stream: true, max_tokens: 2 });
  const headers = { "content-type": "application/json" };
  const url = `${process.env.SERVELITE_URL}/v1/chat/completions`;
  const text = await (await fetch(url, { method: "POST", headers, body })).text();
  assert.ok(text.endsWith("data: [DONE]\n\n"));
});

test("the SDK's own stream helper", async () => {
  const final = await client.chat.completions.stream({ ...greedy, messages }).finalChatCompletion();
  assert.equal(final.choices[0].message.content, ANSWER);
});

test("completions", async () => {
  const answer = await client.completions.create({ ...greedy, prompt: PROMPT, max_tokens: 4 });
  assert.match(answer.choices[0].text, /Paris/);
  assert.equal(answer.choices[0].finish_reason, "length");
  assert.equal(answer.usage.completion_tokens, 4);
});

test("completions, streaming", async () => {
  const options = { max_tokens: 4, stream: true, stream_options: { include_usage: true } };
  const chunks = await all(await client.completions.create({ ...greedy, prompt: PROMPT, ...options }));
  assert.match(chunks.map((chunk) => chunk.choices[0]?.text ?? "").join(""), /Paris/);
  assert.equal(chunks.at(-2).choices[0].finish_reason, "length");
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.equal(chunks.at(-1).usage.completion_tokens, 4);
});

test("several prompts and answers", async () => {
  const prompt = [PROMPT, "One, two,"];
  const answer = await client.completions.create({ ...greedy, prompt, n: 2, max_tokens: 4, echo: true });
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1, 2, 3]);
  assert.ok(answer.choices.every((choice, at) => choice.text.startsWith(prompt[at >> 1])));
  assert.equal(answer.usage.completion_tokens, 16);
});

test("logprobs with the bytes of each token", async () => {
  const options = { logprobs: true, top_logprobs: 3 };
  const answer = await client.chat.completions.create({ ...greedy, messages, ...options });
  const content = answer.choices[0].logprobs.content.slice(0, -1); // less the stop token
  assert.equal(Buffer.from(content.flatMap((entry) => entry.bytes)).toString(), ANSWER);
  for (const entry of content) {
    assert.equal(entry.top_logprobs.length, 3);
    assert.ok(entry.logprob <= 0 && Math.abs(entry.logprob - entry.top_logprobs[0].logprob) < 1e-6);
  }
});

test("a stop text", async () => {
  const answer = await client.chat.completions.create({ ...greedy, messages, stop: [" Paris"] });
  assert.equal(answer.choices[0].message.content, "The capital of France is");
  assert.equal(answer.choices[0].finish_reason, "stop");
});

test("an answer can be sent back", async () => {
  const first = await client.chat.completions.create({ ...greedy, messages });
  const more = [...messages, first.choices[0].message, { role: "user", content: "And of Germany?" }];
  const answer = await client.chat.completions.create({ ...greedy, messages: more, max_tokens: 20 });
  assert.match(answer.choices[0].message.content, /Berlin/);
  assert.ok(answer.usage.prompt_tokens_details.cached_tokens > 0);
});

test("a stream that is left ends", async () => {
  const stream = await client.completions.create({ ...greedy, prompt: "x", max_tokens: 500, stream: true });
  for await (const chunk of stream) {
    assert.equal(chunk.object, "text_completion");
    break;
  }
});

test("models", async () => {
  assert.deepEqual((await all(client.models.list())).map((model) => model.id), ["demo"]);
  assert.equal((await client.models.retrieve("demo")).id, "demo");
});

test("errors are the SDK's", async () => {
  const ask = (fields) => client.chat.completions.create({ ...greedy, messages, ...fields });
  await assert.rejects(ask({ model: "gpt-none" }), (error) => {
    return error instanceof OpenAI.NotFoundError && error.code === "model_not_found";
  });
  await assert.rejects(ask({ temperature: 5 }), (error) => {
    return error instanceof OpenAI.BadRequestError && error.param === "temperature";
  });
  await assert.rejects(ask({ max_tokens: 5000 }), (error) => error.code === "context_length_exceeded");
});
