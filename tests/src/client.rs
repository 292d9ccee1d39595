//! A client of the public API with a key.

use std::time::Duration;

use anyhow::{Context, Result};
use codelia_proto::v1::{
    CloseSessionRequest, CommandSpec, CreateSessionRequest, File, GetRunRequest, GetSessionRequest,
    ReadFileRequest, Run, Session, StartRunRequest, WatchRunRequest, WatchRunResponse,
    WriteFileFinish, WriteFileOpen, WriteFileRequest, admin_service_client::AdminServiceClient,
    approval_service_client::ApprovalServiceClient, audit_service_client::AuditServiceClient,
    file_service_client::FileServiceClient, flag_service_client::FlagServiceClient,
    info_service_client::InfoServiceClient, policy_service_client::PolicyServiceClient,
    read_file_response, run_service_client::RunServiceClient,
    session_service_client::SessionServiceClient, tool_service_client::ToolServiceClient,
    volume_service_client::VolumeServiceClient, write_file_request,
};
use tonic::{
    Code, Request, Status, Streaming,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Channel, ClientTlsConfig, Endpoint},
};
use tonic_types::StatusExt;

use crate::{Exec, Transcript, within};

/// A client. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Client {
    channel: Channel,
    bearer: Bearer,
    /// The URL of the api.
    pub endpoint: String,
    /// The secret of its key.
    pub secret: String,
}

/// Adds the key to every call.
#[derive(Debug, Clone)]
pub struct Bearer(MetadataValue<Ascii>);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert("authorization", self.0.clone());
        Ok(request)
    }
}

/// A channel that adds the key.
pub type Authorized = InterceptedService<Channel, Bearer>;

impl Client {
    /// Connects without TLS.
    pub async fn connect(endpoint: &str, secret: &str) -> Result<Self> {
        let channel =
            Endpoint::from_shared(endpoint.to_owned())?.connect_timeout(Duration::from_secs(5));
        Self::connect_channel(channel, endpoint, secret).await
    }

    /// Connects with TLS.
    pub async fn connect_tls(endpoint: &str, secret: &str, tls: ClientTlsConfig) -> Result<Self> {
        let channel = Endpoint::from_shared(endpoint.to_owned())?.tls_config(tls)?;
        Self::connect_channel(channel, endpoint, secret).await
    }

    async fn connect_channel(channel: Endpoint, endpoint: &str, secret: &str) -> Result<Self> {
        let channel = channel.connect().await.with_context(|| format!("connect to {endpoint}"))?;
        let bearer = Bearer(format!("Bearer {secret}").parse()?);
        Ok(Self { channel, bearer, endpoint: endpoint.to_owned(), secret: secret.to_owned() })
    }

    /// The same connection with another key.
    pub fn with_secret(&self, secret: &str) -> Result<Self> {
        let bearer = Bearer(format!("Bearer {secret}").parse()?);
        Ok(Self { bearer, secret: secret.to_owned(), ..self.clone() })
    }

    /// The connection, without the key.
    #[must_use]
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// The connection, with the key.
    #[must_use]
    pub fn authorized(&self) -> Authorized {
        InterceptedService::new(self.channel.clone(), self.bearer.clone())
    }

    /// A client of `SessionService`.
    #[must_use]
    pub fn sessions(&self) -> SessionServiceClient<Authorized> {
        SessionServiceClient::new(self.authorized())
    }

    /// A client of `RunService`.
    #[must_use]
    pub fn runs(&self) -> RunServiceClient<Authorized> {
        RunServiceClient::new(self.authorized()).max_decoding_message_size(64 << 20)
    }

    /// A client of `InfoService`.
    #[must_use]
    pub fn info(&self) -> InfoServiceClient<Authorized> {
        InfoServiceClient::new(self.authorized())
    }

    /// A client of `AuditService`.
    #[must_use]
    pub fn audit(&self) -> AuditServiceClient<Authorized> {
        AuditServiceClient::new(self.authorized())
    }

    /// A client of `ApprovalService`.
    #[must_use]
    pub fn approvals(&self) -> ApprovalServiceClient<Authorized> {
        ApprovalServiceClient::new(self.authorized())
    }

    /// A client of `ToolService`.
    #[must_use]
    pub fn tools(&self) -> ToolServiceClient<Authorized> {
        ToolServiceClient::new(self.authorized())
    }

    /// A client of `VolumeService`.
    #[must_use]
    pub fn volumes(&self) -> VolumeServiceClient<Authorized> {
        VolumeServiceClient::new(self.authorized())
    }

    /// A client of `FlagService`.
    #[must_use]
    pub fn flags(&self) -> FlagServiceClient<Authorized> {
        FlagServiceClient::new(self.authorized())
    }

    /// A client of `FileService`.
    #[must_use]
    pub fn files(&self) -> FileServiceClient<Authorized> {
        FileServiceClient::new(self.authorized())
    }

    /// Writes a file in several messages.
    pub async fn write_file(&self, open: WriteFileOpen, bytes: &[u8]) -> Result<File, Status> {
        use write_file_request::Kind;
        let chunks = bytes.chunks(100_000).map(|chunk| Kind::Data(chunk.to_vec().into()));
        let finish = Kind::Finish(WriteFileFinish {});
        let messages: Vec<_> =
            [Kind::Open(open)].into_iter().chain(chunks).chain([finish]).collect();
        let messages = messages.into_iter().map(|kind| WriteFileRequest { kind: Some(kind) });
        let mut files = self.files();
        let written = files.write_file(tokio_stream::iter(messages));
        let response = within("write a file", written).await?.into_inner();
        response.file.ok_or_else(|| Status::internal("no file"))
    }

    /// Writes text to a file.
    pub async fn put(&self, session: &str, path: &str, text: &str) -> Result<File, Status> {
        let open = WriteFileOpen {
            parent: session.to_owned(),
            path: path.to_owned(),
            ..Default::default()
        };
        self.write_file(open, text.as_bytes()).await
    }

    /// Reads a file.
    pub async fn read_file(&self, request: ReadFileRequest) -> Result<(File, Vec<u8>), Status> {
        let mut stream = within("open a file", self.files().read_file(request)).await?.into_inner();
        let (mut file, mut bytes) = (File::default(), Vec::new());
        while let Some(response) = within("the next chunk of a file", stream.message()).await? {
            match response.kind {
                Some(read_file_response::Kind::File(received)) => file = received,
                Some(read_file_response::Kind::Data(data)) => bytes.extend_from_slice(&data),
                None => return Err(Status::internal("empty message")),
            }
        }
        Ok((file, bytes))
    }

    /// Reads the text of a file.
    pub async fn get(&self, session: &str, path: &str) -> Result<String, Status> {
        let request = ReadFileRequest {
            parent: session.to_owned(),
            path: path.to_owned(),
            ..Default::default()
        };
        let (_, bytes) = self.read_file(request).await?;
        String::from_utf8(bytes).map_err(|_| Status::internal("file is not UTF-8"))
    }

    /// A client of `PolicyService`.
    #[must_use]
    pub fn policies(&self) -> PolicyServiceClient<Authorized> {
        PolicyServiceClient::new(self.authorized())
    }

    /// A client of `AdminService`.
    #[must_use]
    pub fn admin(&self) -> AdminServiceClient<Authorized> {
        AdminServiceClient::new(self.authorized())
    }

    /// Creates a session.
    pub async fn create(&self, request: CreateSessionRequest) -> Result<Session, Status> {
        let response = self.sessions().create_session(request).await?.into_inner();
        response.session.ok_or_else(|| Status::internal("no session"))
    }

    /// Creates a session with defaults.
    pub async fn session(&self) -> Result<Session, Status> {
        self.create(CreateSessionRequest::default()).await
    }

    /// Gets a session.
    pub async fn get_session(&self, name: &str) -> Result<Session, Status> {
        let response =
            self.sessions().get_session(GetSessionRequest { name: name.to_owned() }).await?;
        response.into_inner().session.ok_or_else(|| Status::internal("no session"))
    }

    /// Closes a session.
    pub async fn close(&self, name: &str) -> Result<Session, Status> {
        let response =
            self.sessions().close_session(CloseSessionRequest { name: name.to_owned() }).await?;
        response.into_inner().session.ok_or_else(|| Status::internal("no session"))
    }

    /// Starts a detached run.
    pub async fn start(&self, request: StartRunRequest) -> Result<Run, Status> {
        let response = self.runs().start_run(request).await?.into_inner();
        response.run.ok_or_else(|| Status::internal("no run"))
    }

    /// Gets a run.
    pub async fn get_run(&self, name: &str) -> Result<Run, Status> {
        let response = self
            .runs()
            .get_run(GetRunRequest { name: name.to_owned(), ..Default::default() })
            .await?;
        response.into_inner().run.ok_or_else(|| Status::internal("no run"))
    }

    /// Opens a watch of a run.
    pub async fn watch(
        &self,
        name: &str,
        position: i64,
    ) -> Result<Streaming<WatchRunResponse>, Status> {
        let request = WatchRunRequest { name: name.to_owned(), position, ..Default::default() };
        Ok(self.runs().watch_run(request).await?.into_inner())
    }

    /// Watches a run from `position` to its end.
    pub async fn watch_to_end(&self, name: &str, position: i64) -> Result<Transcript, Status> {
        let mut stream = self.watch(name, position).await?;
        let mut transcript = Transcript::from_position(position);
        while let Some(response) = within("the next event", stream.message()).await? {
            transcript.push(response.event.unwrap_or_default());
        }
        Ok(transcript)
    }

    /// Executes a shell script in a session and waits until it ends.
    pub async fn exec(&self, session: &str, script: &str) -> Result<Transcript> {
        Exec::start(self, shell(session, script)).await?.finish().await
    }
}

/// Builds a request to run a program in a session.
#[must_use]
pub fn command(session: &str, argv: &[&str]) -> StartRunRequest {
    let argv = argv.iter().map(|&word| word.to_owned()).collect();
    StartRunRequest {
        parent: session.to_owned(),
        command: Some(CommandSpec { argv, ..CommandSpec::default() }),
        ..StartRunRequest::default()
    }
}

/// Builds a request to run a shell script in a session.
#[must_use]
pub fn shell(session: &str, script: &str) -> StartRunRequest {
    command(session, &["sh", "-c", script])
}

/// The details of a refused call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The gRPC code.
    pub code: Code,
    /// The stable reason.
    pub reason: String,
    /// The fields at fault.
    pub fields: Vec<String>,
    /// The quotas that were reached.
    pub quotas: Vec<String>,
    /// When to retry.
    pub retry_after: Option<Duration>,
}

/// Extracts the details of a refused call.
///
/// # Panics
/// If it lacks the `ErrorInfo` that every refusal must carry.
#[must_use]
pub fn refusal(status: &Status) -> Refusal {
    let details = status.get_error_details();
    let info =
        details.error_info().unwrap_or_else(|| panic!("refusal without ErrorInfo: {status:?}"));
    assert_eq!(info.domain, "codelia.dev", "{status:?}");
    let bad = details.bad_request().into_iter().flat_map(|bad| &bad.field_violations);
    let quotas = details.quota_failure().into_iter().flat_map(|failure| &failure.violations);
    Refusal {
        code: status.code(),
        reason: info.reason.clone(),
        fields: bad.map(|violation| violation.field.clone()).collect(),
        quotas: quotas
            .map(|violation| violation.subject.clone())
            .chain(info.metadata.get("quota").cloned())
            .collect(),
        retry_after: details.retry_info().and_then(|retry| retry.retry_delay),
    }
}
