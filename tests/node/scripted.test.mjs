// The Node clients' own helpers, unmodified, against the scripted server at SERVELITE_URL (tests/http/scripted.py):
// OpenAI's SDK, and Vercel's AI SDK over three of the APIs.

import assert from "node:assert/strict";
import { test } from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, isStepCount, Output, streamObject, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const baseURL = `${process.env.SERVELITE_URL}/v1`;
const apiKey = process.env.SERVELITE_KEY;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const Place = z.object({ city: z.string(), days: z.number().int() });
const PLACE = { city: "Oslo", days: 3 };
const ASKED = { city: "Oslo", days: 2 };
const HELLO = "Hello to you, Jürgen 🙂.";
const REPORT = { Oslo: "Oslo: 12 degrees", Bergen: "Bergen: 9 degrees" };
const FINAL = "It is 12 degrees in Oslo.";
const weather = { name: "get_weather", description: "The weather of some days.", parameters: Place };

function saying(content) {
  return { model: "demo", messages: [{ role: "user", content }] };
}

test("openai: parse, with zod", async () => {
  const format = zodResponseFormat(Place, "place");
  const answer = await client.chat.completions.parse({
    ...saying("A place, as an object."),
    response_format: format,
  });
  assert.deepEqual(answer.choices[0].message.parsed, PLACE);
});

test("openai: parse, of a call", async () => {
  const tools = [zodFunction(weather)];
  const answer = await client.chat.completions.parse({ ...saying("The weather in Oslo?"), tools });
  assert.deepEqual(answer.choices[0].message.tool_calls[0].function.parsed_arguments, ASKED);
  assert.equal(answer.choices[0].finish_reason, "tool_calls");
});

test("openai: stream, with calls told as they come", async () => {
  const done = [];
  const stream = client.chat.completions
    .stream({ ...saying("The weather in Oslo and Bergen?"), tools: [zodFunction(weather)] })
    .on("tool_calls.function.arguments.done", (event) => done.push(event.parsed_arguments.city));
  const final = await stream.finalChatCompletion();
  assert.deepEqual(done, ["Oslo", "Bergen"]);
  assert.deepEqual(final.choices[0].message.tool_calls.map((call) => call.function.parsed_arguments.city), done);
});

for (const stream of [false, true]) {
  test(`openai: runTools, ${stream ? "streamed" : "whole"}`, async () => {
    const called = [];
    const run = ({ city }) => {
      called.push(city);
      return REPORT[city];
    };
    const fields = { type: "function", function: { ...weather, parameters: z.toJSONSchema(Place) } };
    fields.function.parse = JSON.parse;
    fields.function.function = run;
    const runner = client.chat.completions.runTools({
      ...saying("The weather in Oslo?"),
      tools: [fields],
      ...(stream ? { stream } : {}),
    });
    assert.equal(await runner.finalContent(), FINAL);
    assert.deepEqual(called, ["Oslo"]);
  });
}

test("openai: responses.parse and responses.stream", async () => {
  const asked = { model: "demo", input: "A place, as an object.", text: { format: zodTextFormat(Place, "place") } };
  assert.deepEqual((await client.responses.parse(asked)).output_parsed, PLACE);
  const stream = client.responses.stream(asked);
  const types = [];
  for await (const event of stream) types.push(event.type);
  assert.equal(types[0], "response.created");
  assert.equal(types.at(-1), "response.completed");
  assert.deepEqual((await stream.finalResponse()).output_parsed, PLACE);
});

test("openai: responses.stream, with a call and its output", async () => {
  const tools = [zodResponsesFunction(weather)];
  const input = [{ role: "user", content: "The weather in Oslo?" }];
  const first = await client.responses.stream({ model: "demo", input, tools }).finalResponse();
  const call = first.output.find((item) => item.type === "function_call");
  assert.deepEqual(call.parsed_arguments, ASKED);
  const { parsed_arguments: _, ...sent } = call;
  const output = { type: "function_call_output", call_id: call.call_id, output: REPORT.Oslo };
  const next = await client.responses.create({ model: "demo", input: [...input, sent, output], tools });
  assert.equal(next.output_text, FINAL);
});

const compatible = createOpenAICompatible({
  name: "servelite",
  baseURL,
  apiKey,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL, apiKey });
// Nothing is stored: the Responses client has to send earlier items themselves, not their IDs.
const providerOptions = { openai: { store: false } };
const MODELS = {
  "openai-compatible": compatible("demo"),
  "openai, chat": openai.chat("demo"),
  "openai, responses": openai.responses("demo"),
  anthropic: createAnthropic({ baseURL, apiKey })("demo"),
};
const tools = {
  get_weather: tool({
    description: weather.description,
    inputSchema: Place,
    execute: async ({ city }) => REPORT[city],
  }),
};

for (const [name, model] of Object.entries(MODELS)) {
  test(`ai, ${name}: streamText`, async () => {
    const result = streamText({ model, prompt: "Say hello.", onError: ({ error }) => assert.fail(error) });
    const parts = [];
    for await (const part of result.textStream) parts.push(part);
    assert.equal(parts.join(""), HELLO);
    assert.ok(parts.length > 1);
    assert.equal(await result.finishReason, "stop");
    const usage = await result.usage;
    assert.ok(usage.inputTokens > 5 && usage.outputTokens > 5);
  });

  test(`ai, ${name}: streamText with tools, to the end`, async () => {
    const result = streamText({
      model,
      tools,
      providerOptions,
      stopWhen: isStepCount(3),
      prompt: "The weather in Oslo?",
      onError: ({ error }) => assert.fail(error),
    });
    const kinds = new Set();
    for await (const part of result.fullStream) kinds.add(part.type);
    for (const kind of ["text-delta", "tool-input-delta", "tool-call", "tool-result"]) assert.ok(kinds.has(kind), kind);
    const steps = await result.steps;
    assert.deepEqual(steps.map((step) => step.finishReason), ["tool-calls", "stop"]);
    assert.deepEqual(steps[0].toolCalls.map((call) => call.input), [ASKED]);
    assert.equal(await result.text, FINAL);
  });

  test(`ai, ${name}: two calls of one turn`, async () => {
    const result = await generateText({ model, tools, prompt: "The weather in Oslo and Bergen?" });
    assert.deepEqual(result.toolCalls.map((call) => call.input.city), ["Oslo", "Bergen"]);
    assert.deepEqual(result.toolResults.map((one) => one.output), Object.values(REPORT));
  });

  test(`ai, ${name}: objects`, async () => {
    // Anthropic's API has objects by a forced call.
    const call = name === "anthropic" ? " By a call." : "";
    const asked = { model, prompt: `A place, as an object.${call}` };
    assert.deepEqual((await generateObject({ ...asked, schema: Place })).object, PLACE);
    const output = Output.object({ schema: Place });
    assert.deepEqual((await generateText({ ...asked, output })).output, PLACE);
    const streamed = streamObject({ ...asked, schema: Place });
    let last;
    for await (const partial of streamed.partialObjectStream) last = partial;
    assert.deepEqual([last, await streamed.object], [PLACE, PLACE]);
    const places = { model, prompt: `Places, as objects.${call}`, output: Output.array({ element: Place }) };
    const items = [];
    for await (const item of streamText(places).elementStream) items.push(item.city);
    assert.deepEqual(items, ["Oslo", "Bergen"]);
  });
}

test("ai: embedMany", async () => {
  for (const model of [compatible.embeddingModel("demo"), openai.embedding("demo")]) {
    const { embeddings } = await embedMany({ model, values: ["hello", "x"] });
    assert.equal(embeddings.length, 2);
    assert.ok(embeddings.every((vector) => vector.length === embeddings[0].length && vector.length > 100));
    assert.notDeepEqual(embeddings[0], embeddings[1]);
  }
});
