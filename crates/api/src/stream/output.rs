//! Cuts output to what a client lacks, in events of bounded size. Pure.

use bytes::{Buf, Bytes};
use codelia_proto::v1::OutputEvent;

/// Maximum bytes of output in one event.
const MAX_EVENT_BYTES: usize = 256 * 1024;

/// The position of the first byte of an event.
pub(crate) fn start_position(output: &OutputEvent) -> i64 {
    output.next_position - length(&output.data)
}

/// The part of the output at or after `cursor`; `None` if there is none.
pub(crate) fn after_cursor(mut output: OutputEvent, cursor: i64) -> Option<OutputEvent> {
    let sent = (cursor - start_position(&output)).max(0);
    if sent >= length(&output.data) {
        return None;
    }
    output.data.advance(usize::try_from(sent).ok()?);
    output.offset += sent;
    Some(output)
}

/// Splits the output into events of bounded size.
pub(crate) fn split(output: OutputEvent) -> impl Iterator<Item = OutputEvent> {
    let mut rest = output.data.clone();
    let mut offset = output.offset;
    let mut position = start_position(&output);
    std::iter::from_fn(move || {
        let data = rest.split_to(rest.len().min(MAX_EVENT_BYTES));
        let len = length(&data);
        let start = offset;
        offset += len;
        position += len;
        (len > 0).then_some(OutputEvent {
            stream: output.stream,
            offset: start,
            data,
            next_position: position,
        })
    })
}

fn length(bytes: &Bytes) -> i64 {
    i64::try_from(bytes.len()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(offset: i64, data: &'static [u8], next_position: i64) -> OutputEvent {
        OutputEvent { stream: 1, offset, data: Bytes::from_static(data), next_position }
    }

    #[test]
    fn sent_output_is_not_sent_again() {
        assert_eq!(after_cursor(output(0, b"abc", 3), 3), None);
        assert_eq!(after_cursor(output(4, b"abc", 10), 8), Some(output(5, b"bc", 10)));
        assert_eq!(after_cursor(output(4, b"abc", 10), 2), Some(output(4, b"abc", 10)));
    }

    #[test]
    fn large_output_is_split_without_loss() {
        let data: Vec<u8> = (0..MAX_EVENT_BYTES * 2 + 7).map(|n| n as u8).collect();
        let next_position = 100 + i64::try_from(data.len()).unwrap();
        let large = OutputEvent { stream: 2, offset: 5, data: data.clone().into(), next_position };
        let events: Vec<_> = split(large).collect();
        assert_eq!(events.len(), 3);
        assert_eq!(events.iter().flat_map(|event| event.data.to_vec()).collect::<Vec<_>>(), data);
        assert_eq!(events[1].offset, 5 + i64::try_from(MAX_EVENT_BYTES).unwrap());
        assert_eq!(events[2].next_position, next_position);
    }
}
