//! `codelia export` and `codelia import`.

use std::{io::IsTerminal, path::Path, pin::pin, process::ExitCode};

use anyhow::{Context, Result, bail, ensure};
use codelia_proto::v1::{
    ArchiveFormat, ExportFilesRequest, ExportFilesResponse, ExportSummary, ImportFilesFinish,
    ImportFilesOpen, ImportFilesRequest, ImportFilesResponse, SkipReason, export_files_response,
    import_files_request::Kind,
};
use indicatif::ProgressBar;
use tokio::{io::AsyncReadExt, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::{
    download::{Sink, Target},
    progress,
    upload::{self, CHUNK_BYTES, QUEUE_SIZE, Source},
};
use crate::{
    args,
    client::Client,
    error_report::AboutFile,
    output::{self, Output},
    resolve,
    signals::Signals,
};

const STDIO: &str = "-";
/// The mode of a new archive. The umask applies.
const FILE_MODE: u32 = 0o666;

/// Packs a directory of a session.
pub(crate) async fn export(
    client: &Client,
    args: &args::Export,
    output: Output,
) -> Result<ExitCode> {
    let is_stdout = args.output == Path::new(STDIO);
    ensure!(
        !is_stdout || !std::io::stdout().is_terminal(),
        "an archive cannot be shown on a terminal: name a file with -o, or use a pipe"
    );
    let (session, path) = args.path.split_once(':').unwrap_or((&args.path, ""));
    let is_zstd =
        args.zstd || args.output.extension().is_some_and(|end| end == "zst" || end == "tzst");
    let format = if is_zstd { ArchiveFormat::TarZstd } else { ArchiveFormat::Tar };
    let parent = resolve::session(client, session).await?;
    let request = ExportFilesRequest { parent, path: path.to_owned(), format: format.into() };
    let target =
        if is_stdout { Target::Stdout } else { Target::file(args.output.clone(), args.force) };
    let bar = progress::bar(None);
    let packed = async {
        let mut chunks = client.files().export_files(request).await?.into_inner();
        let mut sink = target.open(FILE_MODE)?;
        let summary = receive(&mut chunks, &mut sink, &bar).await?;
        sink.finish()?;
        Ok::<_, anyhow::Error>(summary)
    };
    // Without a temporary file a signal may end the program at once, also while stdout is blocked.
    let summary = if is_stdout {
        packed.await
    } else {
        let mut signals = Signals::catch()?;
        tokio::select! {
            packed = packed => packed,
            _ = signals.next() => Err(anyhow::anyhow!("interrupted; the incomplete archive was removed")),
        }
    };
    bar.finish_and_clear();
    let summary = summary.about_file(session, path)?;
    report_skipped(&summary);
    if !is_stdout {
        output.print_json(&summary)?;
    }
    Ok(if is_complete(&summary) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Receives an archive up to its summary, without which it is not complete.
async fn receive(
    chunks: &mut Streaming<ExportFilesResponse>,
    sink: &mut Sink,
    bar: &ProgressBar,
) -> Result<ExportSummary> {
    while let Some(chunk) = chunks.message().await? {
        match chunk.kind {
            Some(export_files_response::Kind::Data(data)) => {
                sink.write(&data)?;
                bar.inc(data.len() as u64);
            }
            Some(export_files_response::Kind::Summary(summary)) => return Ok(summary),
            None => {}
        }
    }
    bail!("the archive is not complete: export it again")
}

fn describe(reason: SkipReason) -> &'static str {
    match reason {
        SkipReason::Special => "a special file",
        SkipReason::Permission => "cannot be read by the session's user",
        SkipReason::TooDeep => "its content is too deep",
        SkipReason::Shortened => "became shorter, filled up with zeros",
        SkipReason::Unspecified => "unknown reason",
    }
}

fn report_skipped(summary: &ExportSummary) {
    for file in &summary.skipped {
        output::write_note(&format!("skipped {}: {}", file.path, describe(file.reason())));
    }
    let more = summary.skipped_count - i64::try_from(summary.skipped.len()).unwrap_or(i64::MAX);
    if more > 0 {
        output::write_note(&format!("skipped {more} more files"));
    }
}

/// Whether only special files are missing, which no archive has.
fn is_complete(summary: &ExportSummary) -> bool {
    let special =
        summary.skipped.iter().filter(|file| file.reason() == SkipReason::Special).count();
    i64::try_from(special) == Ok(summary.skipped_count)
}

/// Unpacks an archive in a session.
pub(crate) async fn import(client: &Client, args: &args::Import, output: Output) -> Result<()> {
    let source = if args.file == Path::new(STDIO) {
        Source::stdin()
    } else {
        Source::open(&args.file).await?
    };
    let (session, path) = (&args.path.session, &args.path.path);
    let parent = resolve::session(client, session).await?;
    let open = ImportFilesOpen { parent, path: path.clone(), overwrite: args.force };
    let bar = progress::bar(source.size);
    let imported = send(client, open, source.bytes, &bar).await;
    bar.finish_and_clear();
    output.print_json(&imported.about_file(session, path)?)
}

async fn send(
    client: &Client,
    open: ImportFilesOpen,
    mut bytes: upload::Bytes,
    bar: &ProgressBar,
) -> Result<ImportFilesResponse> {
    let (requests, queue) = mpsc::channel(QUEUE_SIZE);
    let mut files = client.files();
    let mut call = pin!(files.import_files(ReceiverStream::new(queue)));
    let response = tokio::select! {
        // A response before everything was sent is an error.
        response = &mut call => response,
        sent = send_chunks(requests, open, &mut bytes, bar) => {
            sent.context("cannot read the archive")?;
            call.await
        }
    };
    Ok(response?.into_inner())
}

async fn send_chunks(
    requests: mpsc::Sender<ImportFilesRequest>,
    open: ImportFilesOpen,
    bytes: &mut upload::Bytes,
    bar: &ProgressBar,
) -> std::io::Result<()> {
    // A closed queue means that the server has responded already.
    let send = async |kind| requests.send(ImportFilesRequest { kind: Some(kind) }).await.is_ok();
    let mut is_open = send(Kind::Open(open)).await;
    while is_open {
        let mut chunk = Vec::with_capacity(CHUNK_BYTES);
        if (&mut *bytes).take(CHUNK_BYTES as u64).read_to_end(&mut chunk).await? == 0 {
            send(Kind::Finish(ImportFilesFinish {})).await;
            break;
        }
        bar.inc(chunk.len() as u64);
        is_open = send(Kind::Data(chunk.into())).await;
    }
    Ok(())
}
