// A client of the Codelia API for browsers: JSON over fetch, without dependencies.
"use strict";

class Codelia {
  constructor(endpoint, key) {
    this.endpoint = endpoint.replace(/\/+$/, "");
    this.headers = { "content-type": "application/json", authorization: `Bearer ${key}` };
  }

  async post(method, message) {
    const url = `${this.endpoint}/codelia.v1.${method}`;
    const response = await fetch(url, { method: "POST", headers: this.headers, body: JSON.stringify(message) });
    if (!response.ok) throw new Error((await response.json()).message);
    return response;
  }

  // Calls a method that returns one message.
  async call(method, message) {
    return (await this.post(method, message)).json();
  }

  // Calls a method that returns a stream: yields each message when it arrives.
  async *stream(method, message) {
    const body = (await this.post(method, message)).body.pipeThrough(new TextDecoderStream());
    const reader = body.getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (text + value).split("\n");
      text = lines.pop();
      for (const line of lines) {
        const received = JSON.parse(line);
        if (received.error) throw new Error(received.error.message);
        yield received;
      }
    }
  }
}
