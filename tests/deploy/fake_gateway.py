"""A gateway of our own for the demo's tests: answers, streams, takes feedback, fails on demand."""

import json
import uuid

from aiohttp import web

from ingest.ids import inference_id


class FakeGateway:
    """Records what it was asked; `fail_next` requests end with 503, `break_next` streams end early."""

    def __init__(self, answer="Otters eat fish and crabs from the river."):
        self.answer, self.version, self.arm = answer, "v000000", "champion"
        self.requests: list[dict] = []
        self.request_headers: list[dict] = []
        self.feedback: list[dict] = []
        self.events: list[str] = []  # order of "start", "feedback", "end"
        self.fail_next = self.break_next = self.fail_feedback = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/feedback", self._feedback)
        app.router.add_get("/health", self._health)
        return app

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.request_headers.append(dict(request.headers))
        if self.fail_next:
            self.fail_next -= 1
            return web.json_response({"error": {"message": "no engine"}}, status=503)
        inference = inference_id("0a0b", uuid.uuid4().hex)
        headers = {"x-headrace-inference-id": inference, "x-headrace-version": self.version, "x-headrace-arm": self.arm}
        if not body["stream"]:
            choice = {"message": {"content": self.answer}, "finish_reason": "stop"}
            return web.json_response({"choices": [choice]}, headers=headers)
        return await self._stream(request, headers)

    async def _stream(self, request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
        import asyncio

        response = web.StreamResponse(headers={**headers, "content-type": "text/event-stream"})
        await response.prepare(request)
        self.events.append("start")
        words = self.answer.split(" ")
        for number, word in enumerate(words):
            delta = {"content": word if number == 0 else f" {word}"}
            await response.write(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode())
            await asyncio.sleep(0.01)
        if self.break_next:
            self.break_next -= 1
            return response
        end = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        self.events.append("end")
        await response.write(f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n".encode())
        return response

    async def _feedback(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.fail_feedback:
            self.fail_feedback -= 1
            return web.json_response({"error": {"message": "spool full"}}, status=503)
        valid = body.get("metric") and str(body.get("inference_id", "")).startswith("inf_")
        if not valid or isinstance(body.get("value"), dict):
            return web.json_response({"error": {"message": "bad feedback"}}, status=400)
        self.feedback.append(body)
        self.events.append("feedback")
        return web.json_response({"accepted": [{"feedback_id": body.get("feedback_id", "")}]}, status=202)
