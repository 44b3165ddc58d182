-- The load: streamed chat turns of many conversations with one long prompt.
-- wrk … -s turns.lua URL -- CONVERSATIONS WORDS TOKENS FIRST
-- The requests are built before the clock starts, so that the load costs as little as possible.

local requests = {}
local sent = 0

function init(args)
  local conversations, words, tokens, first = tonumber(args[1]), tonumber(args[2]), tonumber(args[3]), tonumber(args[4])
  local prompt = string.rep("word ", words)
  local headers = {["content-type"] = "application/json"}
  for i = 1, conversations do
    local body = string.format(
      '{"model":"m","stream":true,"max_tokens":%d,"conversation_id":"c%d","messages":[{"role":"user","content":"%s"}]}',
      tokens, i, prompt)
    requests[i] = wrk.format("POST", "/v1/chat/completions", headers, body)
  end
  sent = first
end

function request()
  sent = sent % #requests + 1
  return requests[sent]
end

-- One line for the harness; times are in microseconds.
function done(summary, latency, _)
  local errors = summary.errors
  io.write(string.format(
    'RESULT {"turns":%d,"bytes":%d,"duration_us":%d,"p50_us":%d,"p99_us":%d,' ..
    '"connect_errors":%d,"read_errors":%d,"write_errors":%d,"timeouts":%d,"bad_status":%d}\n',
    summary.requests, summary.bytes, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.connect, errors.read, errors.write, errors.timeout, errors.status))
end
