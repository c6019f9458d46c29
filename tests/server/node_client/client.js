// Usage: node client.js http://HOST:PORT < request.json
// Prints one JSON object: what Generate and UnaryGenerate answered, or the status they ended with.

import { readFileSync } from "node:fs";
import { fromJson, toJson } from "@bufbuild/protobuf";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { GenerateRequestSchema, GenerateResponseSchema, Inference, UnaryGenerateResponseSchema } from "./server/inference_pb.js";

const client = createClient(Inference, createGrpcTransport({ baseUrl: process.argv[2] }));
const request = fromJson(GenerateRequestSchema, JSON.parse(readFileSync(0, "utf8")));

async function outcome(call) {
  try {
    return { ok: await call() };
  } catch (error) {
    const { rawMessage, code, metadata } = ConnectError.from(error);
    return { status: Code[code], message: rawMessage, word: metadata.get("jaxinfer-error-code") };
  }
}

async function generate() {
  const events = [];
  for await (const response of client.generate(request)) {
    events.push(toJson(GenerateResponseSchema, response));
  }
  return events;
}

const answers = {
  generate: await outcome(generate),
  unary: await outcome(async () => toJson(UnaryGenerateResponseSchema, await client.unaryGenerate(request))),
};
console.log(JSON.stringify(answers));
process.exit(0);
