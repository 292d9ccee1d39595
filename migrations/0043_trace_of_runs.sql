-- What: the span of the call that started a run, as a W3C traceparent.
-- Why:  a run that waits for a worker continues the trace of its caller.
-- Lock: ACCESS EXCLUSIVE on live_runs for a moment. The new column is null unless traces are exported.

ALTER TABLE live_runs ADD COLUMN traceparent text CHECK (length(traceparent) = 55);
