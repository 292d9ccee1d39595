//! The internal API over TCP requires certificates on both sides.

use std::{fs, net::SocketAddr, path::Path, sync::Arc};

use codelia_proto::{
    internal::v1::{CancelRunRequest, worker_service_client::WorkerServiceClient},
    v1::{StatFileRequest, file_service_client::FileServiceClient},
};
use codelia_server::TlsFiles;
use codelia_tests::{Certificates, Database, Scratch};
use codelia_worker::{Error, Listen, Options, Service};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};
use tonic_types::StatusExt;

use crate::{
    fixture::{Settings, options},
    process_backend::ProcessBackend,
};

fn issue(authority: &Certificates, scratch: &Scratch, name: &str) -> TlsFiles {
    authority.write(scratch.path(), name, &["codelia-worker"]).unwrap();
    TlsFiles {
        ca: Some(scratch.join(&format!("{name}-ca.pem"))),
        cert: scratch.join(&format!("{name}.pem")),
        key: scratch.join(&format!("{name}.key")),
    }
}

fn pem(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap()
}

/// Returns whether a caller that trusts `authority` and presents `identity` is answered.
async fn is_answered(address: &str, authority: &TlsFiles, identity: Option<&TlsFiles>) -> bool {
    let mut tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(pem(authority.ca.as_deref().unwrap())))
        .domain_name("codelia-worker");
    if let Some(identity) = identity {
        tls = tls.identity(Identity::from_pem(pem(&identity.cert), pem(&identity.key)));
    }
    let endpoint = Endpoint::from_shared(address.to_owned()).unwrap().tls_config(tls).unwrap();
    let Ok(channel) = endpoint.connect().await else { return false };
    let request =
        CancelRunRequest { run_id: codelia_types::RunId::generate().to_string(), grace: None };
    let runs = WorkerServiceClient::new(channel.clone()).cancel_run(request).await.is_ok();
    // Without a lease even an api is refused, but by the service.
    let refused =
        FileServiceClient::new(channel).stat_file(StatFileRequest::default()).await.unwrap_err();
    let files = refused.get_details_error_info().is_some();
    assert_eq!(runs, files, "both services are for apis only: {refused}");
    runs
}

#[tokio::test]
async fn only_callers_with_trusted_certificate_are_answered() {
    let ((database, store), scratch) =
        (Database::migrated().await.unwrap(), Scratch::new().unwrap());
    let listen: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let plain = Options {
        listen: Listen::Tcp(listen),
        ..options(&"w-1".parse().unwrap(), &scratch, Settings::default())
    };
    let refused =
        Service::start(plain.clone(), store.clone(), vec![Arc::new(ProcessBackend::default())])
            .await;
    assert!(matches!(refused, Err(Error::TlsMissing)), "TCP without TLS is refused");

    let (ours, foreign) = (Certificates::new().unwrap(), Certificates::new().unwrap());
    let (worker, api) = (issue(&ours, &scratch, "worker"), issue(&ours, &scratch, "api"));
    let stranger = issue(&foreign, &scratch, "stranger");
    let secured = Options { internal_tls: Some(worker), ..plain };
    let service = Service::start(secured, store.clone(), vec![Arc::new(ProcessBackend::default())])
        .await
        .unwrap();
    let address = service.address().to_owned();
    assert!(address.starts_with("https://127.0.0.1:"));
    assert!(is_answered(&address, &api, Some(&api)).await);
    assert!(!is_answered(&address, &api, None).await);
    assert!(!is_answered(&address, &api, Some(&stranger)).await);

    let shutdown = CancellationToken::new();
    shutdown.cancel();
    service.run(shutdown).await.unwrap();
    store.close().await;
    database.end().await.unwrap();
}
