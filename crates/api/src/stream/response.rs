//! The events of a run as the stream of a response, in few messages: a client, and each process on
//! the way to it, wakes for each message.

use std::time::Duration;

use codelia_proto::v1::{RunEvent, run_event::Kind};
use futures::{Stream, StreamExt, stream};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

/// How long the response waits for the start of the command. A prepared sandbox starts it sooner.
const MAX_WAIT: Duration = Duration::from_millis(2);

type Event = Result<RunEvent, Status>;

/// Waits until the events up to the start of the command can be sent in one message. The stream
/// ends with the event that ends the run, so that the status of the call is in the same message.
pub(crate) async fn response_events(
    mut events: mpsc::Receiver<Event>,
) -> impl Stream<Item = Event> + Send {
    let mut first = Vec::new();
    let until_started = async {
        while let Some(event) = events.recv().await {
            let waits = comes_before_start(&event);
            first.push(event);
            if !waits {
                return;
            }
        }
    };
    // What comes later is sent as it comes.
    let _ = timeout(MAX_WAIT, until_started).await;
    let all = stream::iter(first).chain(ReceiverStream::new(events));
    stream::unfold(Some(all), |all| async {
        let mut all = all?;
        let event = all.next().await?;
        let rest = (!ends_run(&event)).then_some(all);
        Some((event, rest))
    })
}

fn comes_before_start(event: &Event) -> bool {
    matches!(kind(event), Some(Kind::Queued(_) | Kind::Assigned(_)))
}

fn ends_run(event: &Event) -> bool {
    matches!(kind(event), Some(Kind::Finished(_)))
}

fn kind(event: &Event) -> Option<&Kind> {
    event.as_ref().ok()?.kind.as_ref()
}

#[cfg(test)]
mod tests {
    use codelia_proto::v1::{AssignedEvent, FinishedEvent, QueuedEvent, StartedEvent};
    use futures::FutureExt;

    use super::*;

    fn event(kind: Kind) -> Event {
        Ok(RunEvent { kind: Some(kind) })
    }

    fn queued() -> Event {
        event(Kind::Queued(QueuedEvent::default()))
    }

    #[tokio::test(start_paused = true)]
    async fn events_until_start_are_ready_together() {
        let (sender, receiver) = mpsc::channel(8);
        sender.send(queued()).await.unwrap();
        let mut response = Box::pin(response_events(receiver));
        assert!(response.as_mut().now_or_never().is_none(), "waits for the start");
        sender.send(event(Kind::Assigned(AssignedEvent::default()))).await.unwrap();
        sender.send(event(Kind::Started(StartedEvent::default()))).await.unwrap();
        let mut events = Box::pin(response.await);
        for _ in 0..3 {
            assert!(events.next().now_or_never().flatten().is_some());
        }
        assert!(events.next().now_or_never().is_none(), "nothing else came");
    }

    #[tokio::test(start_paused = true)]
    async fn queued_run_does_not_delay_the_response() {
        let (sender, receiver) = mpsc::channel(8);
        sender.send(queued()).await.unwrap();
        let mut events = Box::pin(response_events(receiver).await);
        assert!(events.next().now_or_never().flatten().is_some());
        sender.send(Err(Status::unavailable("later"))).await.unwrap();
        assert!(events.next().await.unwrap().is_err());
    }

    #[tokio::test]
    async fn stream_ends_with_the_run() {
        let (sender, receiver) = mpsc::channel(8);
        sender.send(event(Kind::Finished(FinishedEvent::default()))).await.unwrap();
        let mut events = Box::pin(response_events(receiver).await);
        assert!(events.next().await.is_some());
        // Although the channel is open.
        assert!(events.next().now_or_never().unwrap().is_none());
        drop(sender);
    }
}
