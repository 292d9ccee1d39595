//! The bytes of a file on their way between a caller and the session's worker. Little of it is here
//! at any time, and a caller that does not go on is not waited for.

use std::{pin::pin, time::Duration};

use codelia_proto::{
    internal::v1::{self as wire, FileRefusalReason as Reason, OpenedFile, write_file_request::Kind},
    v1::{self, write_file_request},
};
use codelia_store::SessionRef;
use codelia_telemetry::task;
use codelia_types::SessionId;
use futures::Stream;
use tokio::{
    sync::mpsc,
    time::{Instant, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::{
    error::Refused,
    request,
    route::{Pause, Road},
};
use crate::{
    request::{Deadline, unreadable},
    resource_name,
    status::ApiError,
};

/// Pieces that wait for the other side.
const AHEAD: usize = 2;
/// How long a caller may take for its next piece, or to take one.
const STALL: Duration = Duration::from_secs(60);
/// How often a long transfer is noted as use of its session.
const USE_EVERY: Duration = Duration::from_secs(1);

type Uploaded = Streaming<v1::WriteFileRequest>;
type Piece = Result<v1::ReadFileResponse, Status>;

/// Reads what a write begins with.
pub(super) async fn opening(requests: &mut Uploaded) -> Result<(SessionRef, v1::WriteFileOpen), ApiError> {
    match next(requests).await? {
        Some(write_file_request::Kind::Open(open)) => {
            let within = |error: ApiError| error.within("open");
            let session = resource_name::session("parent", &open.parent).map_err(within)?;
            Ok((session, request::open(open).map_err(within)?))
        }
        Some(write_file_request::Kind::Data(_) | write_file_request::Kind::Finish(_)) | None => {
            Err(ApiError::invalid("open", "must be the first message"))
        }
    }
}

/// Passes a file on to the worker. It is published there when all of it has come, and not otherwise.
pub(super) async fn write(
    road: &Road,
    open: v1::WriteFileOpen,
    mut requests: Uploaded,
) -> Result<v1::WriteFileResponse, ApiError> {
    let holder = road.holder(&mut Pause::new()).await?;
    let (pieces, passed_on) = mpsc::channel(AHEAD);
    let opened = OpenedFile { session: Some(holder.session.clone()), open: Some(open) };
    // There is room for the first one.
    let _ = pieces.try_send(message(Kind::Open(opened)));
    let mut client = road.client(&holder)?;
    let mut answer = pin!(client.write_file(ReceiverStream::new(passed_on)));
    let answered = tokio::select! {
        // Before all of it was sent: a refusal.
        answered = &mut answer => answered,
        fed = feed(road, holder.id, &mut requests, pieces) => {
            fed?;
            answer.await
        }
    };
    let response = answered.map_err(|status| road.failure(&holder, &status))?.into_inner().response;
    response.ok_or_else(|| ApiError::internal("a worker told of no file"))
}

/// Sends what the caller sends. Only the caller's own word makes the file whole: a stream that is broken
/// off looks like one that has ended.
async fn feed(
    road: &Road,
    session: SessionId,
    requests: &mut Uploaded,
    pieces: mpsc::Sender<wire::WriteFileRequest>,
) -> Result<(), ApiError> {
    let mut used = Instant::now();
    loop {
        let piece = match next(requests).await? {
            Some(write_file_request::Kind::Data(data)) => {
                request::data(&data)?;
                Kind::Data(data)
            }
            Some(write_file_request::Kind::Finish(finish)) => Kind::Finish(finish),
            Some(write_file_request::Kind::Open(_)) => {
                return Err(ApiError::invalid("open", "only the first message opens"));
            }
            None => return Err(ApiError::invalid("finish", "must be the last message")),
        };
        let is_last = matches!(piece, Kind::Finish(_));
        // Who does not take it any more has answered already.
        if pieces.send(message(piece)).await.is_err() || is_last {
            return Ok(());
        }
        if used.elapsed() > USE_EVERY {
            road.used(session).await?;
            used = Instant::now();
        }
    }
}

fn message(kind: Kind) -> wire::WriteFileRequest {
    wire::WriteFileRequest { kind: Some(kind) }
}

/// The caller's next message; `None` at its end.
async fn next(requests: &mut Uploaded) -> Result<Option<write_file_request::Kind>, ApiError> {
    let stalled = |_| ApiError::from(Refused::new(Reason::Stalled, "data"));
    let message = timeout(STALL, requests.message()).await.map_err(stalled)?;
    // Who broke off is not told anything; what came so far is dropped.
    let broken = || Refused::new(Reason::Stalled, "data").into();
    let message = message.map_err(|status| unreadable(&status).unwrap_or_else(broken))?;
    match message {
        None => Ok(None),
        Some(message) => message.kind.map(Some).ok_or_else(|| ApiError::invalid("kind", "is missing")),
    }
}

/// Passes a file on to the caller, until it ends, the caller is gone or its time over, or the server stops.
pub(super) fn forward(
    road: Road,
    (session, pieces): (SessionId, Streaming<wire::ReadFileResponse>),
    deadline: Deadline,
) -> impl Stream<Item = Piece> + Send {
    let (out, answers) = mpsc::channel(AHEAD);
    task::background("read file", async move {
        let ended = tokio::select! {
            ended = pass_on(&road, session, pieces, &out) => ended,
            () = out.closed() => Ok(()),
            () = deadline.passed() => Err(ApiError::DeadlineExceeded),
            () = road.context.cut.cancelled() => Err(ApiError::ShuttingDown),
        };
        if let Err(error) = ended
            && out.try_send(Err(error.into())).is_err()
        {
            tracing::debug!("the client did not take the last word");
        }
    });
    ReceiverStream::new(answers)
}

async fn pass_on(
    road: &Road,
    session: SessionId,
    mut pieces: Streaming<wire::ReadFileResponse>,
    out: &mpsc::Sender<Piece>,
) -> Result<(), ApiError> {
    let broken = |status: Status| match Refused::read(&status) {
        Some(refused) => refused.into(),
        None => ApiError::Unavailable { detail: format!("a worker's file broke off: {status}") },
    };
    let mut used = Instant::now();
    while let Some(piece) = pieces.message().await.map_err(broken)? {
        let piece = piece.response.ok_or_else(|| ApiError::internal("a worker sent nothing"))?;
        match out.send_timeout(Ok(piece), STALL).await {
            Ok(()) => {}
            Err(mpsc::error::SendTimeoutError::Closed(_)) => return Ok(()),
            Err(mpsc::error::SendTimeoutError::Timeout(_)) => {
                return Err(Refused::new(Reason::Stalled, "").into());
            }
        }
        if used.elapsed() > USE_EVERY {
            road.used(session).await?;
            used = Instant::now();
        }
    }
    Ok(())
}
