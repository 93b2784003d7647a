// A streamed answer with the OpenAI SDK for Node (`npm install openai`), Node 22 or newer.

import OpenAI from "openai";

const client = new OpenAI({
  baseURL: `${process.env.SERVELITE_URL ?? "http://127.0.0.1:8000"}/v1`,
  apiKey: process.env.SERVELITE_KEY ?? "none",
});

const stream = await client.chat.completions.create({
  model: "demo",
  messages: [{ role: "user", content: "What is the capital of France?" }],
  temperature: 0,
  stream: true,
});
for await (const chunk of stream) {
  process.stdout.write(chunk.choices[0]?.delta.content ?? "");
}
console.log();
