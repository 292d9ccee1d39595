//! All methods of the public API, from its descriptors, and a way to call each with arbitrary
//! bytes.

use anyhow::{Context, Result, bail};
use bytes::{Buf, BufMut, Bytes};
use codelia_proto::PUBLIC_DESCRIPTORS;
use prost::Message;
use prost_reflect::{DescriptorPool, MethodDescriptor};
use prost_types::FileDescriptorProto;
use tonic::{
    Status,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
};

use crate::{Client, within};

/// The descriptor of a method.
pub type Method = MethodDescriptor;

/// Returns all methods of all services, from the descriptors that the api was built with.
pub fn all_methods() -> Result<Vec<Method>> {
    let pool = DescriptorPool::decode(PUBLIC_DESCRIPTORS)?;
    Ok(pool.services().flat_map(|service| service.methods().collect::<Vec<_>>()).collect())
}

/// Returns the names of all methods of `codelia.v1`, as a running api reports them by reflection.
pub async fn reflected_methods(client: &Client) -> Result<Vec<String>> {
    let services = match reflect(client, MessageRequest::ListServices(String::new())).await? {
        MessageResponse::ListServicesResponse(list) => list.service,
        other => bail!("expected a list of services, got {other:?}"),
    };
    let mut names = Vec::new();
    for service in
        services.into_iter().map(|service| service.name).filter(|name| name.starts_with("codelia."))
    {
        names.extend(methods_of(client, &service).await?);
    }
    Ok(names)
}

async fn methods_of(client: &Client, service: &str) -> Result<Vec<String>> {
    let file =
        match reflect(client, MessageRequest::FileContainingSymbol(service.to_owned())).await? {
            MessageResponse::FileDescriptorResponse(files) => files.file_descriptor_proto,
            other => bail!("expected the file of {service}, got {other:?}"),
        };
    let mut names = Vec::new();
    for bytes in file {
        let file = FileDescriptorProto::decode(bytes.as_slice())?;
        for found in file
            .service
            .iter()
            .filter(|found| service == format!("{}.{}", file.package(), found.name()))
        {
            names.extend(found.method.iter().map(|method| format!("{service}.{}", method.name())));
        }
    }
    Ok(names)
}

async fn reflect(client: &Client, request: MessageRequest) -> Result<MessageResponse> {
    let request = ServerReflectionRequest { host: String::new(), message_request: Some(request) };
    let mut reflection = ServerReflectionClient::new(client.channel());
    let mut answers =
        reflection.server_reflection_info(tokio_stream::once(request)).await?.into_inner();
    let answer = answers.message().await?.context("no answer from the reflection service")?;
    answer.message_response.context("empty answer from the reflection service")
}

/// Calls a method with one encoded message and returns the first message of the answer, if any.
/// Unary and streaming methods have the same wire format.
pub async fn call(
    client: &Client,
    method: &Method,
    message: Vec<u8>,
) -> Result<Option<Bytes>, Status> {
    let mut grpc = Grpc::new(client.authorized());
    grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let path = format!("/{}/{}", method.parent_service().full_name(), method.name());
    let path = path.parse().map_err(|_| Status::internal("invalid path"))?;
    let request = tonic::Request::new(tokio_stream::once(Bytes::from(message)));
    let answer = within(method.full_name(), grpc.streaming(request, path, Raw)).await?;
    within(method.full_name(), answer.into_inner().message()).await
}

/// A codec that passes encoded messages through.
#[derive(Debug, Clone, Copy)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        into.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        let length = from.remaining();
        Ok(Some(from.copy_to_bytes(length)))
    }
}
