//! `codelia trace`: what a run did that tried to leave its sandbox, from the audit.

use std::ops::ControlFlow;

use anyhow::{Context, Result, bail};
use codelia_proto::v1::{AuditEvent, GetRunRequest, ListEventsRequest};
use serde_json::Value;

use crate::{args, client::Client, output::Output, resolve, units};

pub(crate) async fn trace(client: &Client, args: &args::RunName, output: Output) -> Result<()> {
    let name = resolve::run(client, &args.run).await?;
    let run = client.call(GetRunRequest { name, ..Default::default() }).await?;
    let Some(event) = find(client, &run.session_id, &run.run_id).await? else {
        bail!(
            "run {} has no trace: it gave no sign of an attempt to leave its sandbox",
            run.run_id
        );
    };
    output.print_message_as(&event, &text(&event)?)
}

/// The event of a run, among those of its session.
async fn find(client: &Client, session: &str, run: &str) -> Result<Option<AuditEvent>> {
    let request = ListEventsRequest {
        parent: format!("sessions/{session}"),
        kind: "ESCAPE_ATTEMPT".to_owned(),
        ..Default::default()
    };
    let mut found = None;
    let take = |page: Vec<AuditEvent>| {
        found = page.into_iter().find(|event| event.run_id == run);
        Ok(if found.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    };
    client.each_page(request, take).await?;
    Ok(found)
}

/// A section for each part of the trace. Parts that are empty or unknown are left out.
fn text(event: &AuditEvent) -> Result<String> {
    let detail: Value =
        serde_json::from_str(&event.detail).context("the event has no readable detail")?;
    let trace = &detail["trace"];
    let mut lines = vec![
        format!("when        {}", units::timestamp(event.create_time.as_ref()).unwrap_or_default()),
        format!("severity    {}", words(&detail["severity"])),
        format!("responses   {}", responses(&detail["response"])),
        format!("program     {}", words(&trace["program"])),
        format!("directory   {}", words(&trace["working_directory"])),
        format!(
            "variables   {}",
            items(&trace["environment_names"]).map(words).collect::<Vec<_>>().join(" ")
        ),
    ];
    let mut section = |title: &str, rows: Vec<String>| {
        if !rows.is_empty() {
            lines.push(format!("\n{title}:"));
            lines.extend(rows.into_iter().map(|row| format!("  {row}")));
        }
    };
    let sign = |sign: &Value| {
        format!(
            "{} {}: {}",
            words(&sign["severity"]),
            words(&sign["type"]),
            words(&sign["description"])
        )
    };
    section("signs", items(&detail["indicators"]).map(sign).collect());
    let call = |call: &Value| {
        format!(
            "{}x {} {} {}",
            call["count"],
            words(&call["kind"]),
            words(&call["call"]),
            words(&call["path"])
        )
    };
    section("calls", items(&trace["calls"]).map(|it| call(it).trim_end().to_owned()).collect());
    let process = |process: &Value| {
        let [pid, parent, program] =
            ["pid", "parent_pid", "program"].map(|field| words(&process[field]));
        format!("{pid:>6} {parent:>6} {program}")
    };
    section("processes (id, parent, program)", items(&trace["processes"]).map(process).collect());
    section("connections", items(&trace["connections"]).map(Value::to_string).collect());
    section("last output", words(&trace["last_output"]).lines().map(str::to_owned).collect());
    Ok(lines.join("\n"))
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

/// A text as it is, nothing for null.
fn words(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

fn responses(response: &Value) -> String {
    let done =
        response.as_object().into_iter().flatten().filter(|(_, done)| **done == Value::Bool(true));
    let names: Vec<_> = done.map(|(name, _)| name.as_str()).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_part_of_a_trace_is_printed() {
        let detail = json!({
            "severity": "critical",
            "indicators": [{ "type": "SYSCALL", "severity": "critical", "description": "mount(0x0)" }],
            "response": { "terminate": true, "alert": true, "quarantine_tool": false },
            "trace": {
                "program": "sh", "working_directory": "", "environment_names": ["A", "B"],
                "calls": [{ "count": 2, "kind": "EXEC_DENIED", "call": "execve(0x1)", "path": "/usr/bin/id" }],
                "processes": [{ "pid": 2, "parent_pid": 1, "program": "sh" }],
                "connections": [{ "host": "example.org" }], "last_output": "one\ntwo\n",
            },
        });
        let create_time = Some(prost_types::Timestamp { seconds: 1, nanos: 0 });
        let event = AuditEvent { create_time, detail: detail.to_string(), ..Default::default() };
        let text = text(&event).unwrap();
        for part in [
            "when        1970-01-01T00:00:01Z",
            "responses   alert, terminate",
            "variables   A B",
            "critical SYSCALL: mount(0x0)",
            "2x EXEC_DENIED execve(0x1) /usr/bin/id",
            "     2      1 sh",
            "example.org",
            "  two",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
