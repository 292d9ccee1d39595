//! Every method of the public API, found in its descriptors, and a way to call any of them with
//! any bytes.

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

/// A method with its descriptor.
pub type Method = MethodDescriptor;

/// All methods of all services, from the descriptors the api was built with.
pub fn all_methods() -> Result<Vec<Method>> {
    let pool = DescriptorPool::decode(PUBLIC_DESCRIPTORS)?;
    Ok(pool.services().flat_map(|service| service.methods().collect::<Vec<_>>()).collect())
}

/// The names of all methods of `codelia.v1`, as a running api tells them by reflection.
pub async fn reflected_methods(client: &Client) -> Result<Vec<String>> {
    let services = match reflect(client, MessageRequest::ListServices(String::new())).await? {
        MessageResponse::ListServicesResponse(list) => list.service,
        other => bail!("not a list of services: {other:?}"),
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
    let file = match reflect(client, MessageRequest::FileContainingSymbol(service.to_owned())).await? {
        MessageResponse::FileDescriptorResponse(files) => files.file_descriptor_proto,
        other => bail!("no file for {service}: {other:?}"),
    };
    let mut names = Vec::new();
    for bytes in file {
        let file = FileDescriptorProto::decode(bytes.as_slice())?;
        for found in
            file.service.iter().filter(|found| service == format!("{}.{}", file.package(), found.name()))
        {
            names.extend(found.method.iter().map(|method| format!("{service}.{}", method.name())));
        }
    }
    Ok(names)
}

async fn reflect(client: &Client, request: MessageRequest) -> Result<MessageResponse> {
    let request = ServerReflectionRequest { host: String::new(), message_request: Some(request) };
    let mut reflection = ServerReflectionClient::new(client.channel());
    let mut answers = reflection.server_reflection_info(tokio_stream::once(request)).await?.into_inner();
    let answer = answers.message().await?.context("an answer of the reflection service")?;
    answer.message_response.context("a message in the answer")
}

/// Calls a method with one message given as bytes, and returns the first message that comes back,
/// if any. Bytes on the wire are the same for unary and streaming methods.
pub async fn call(client: &Client, method: &Method, message: Vec<u8>) -> Result<Option<Bytes>, Status> {
    let mut grpc = Grpc::new(client.authorized());
    grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let path = format!("/{}/{}", method.parent_service().full_name(), method.name());
    let path = path.parse().map_err(|_| Status::internal("a path"))?;
    let request = tonic::Request::new(tokio_stream::once(Bytes::from(message)));
    let answer = within(method.full_name(), grpc.streaming(request, path, Raw)).await?;
    within(method.full_name(), answer.into_inner().message()).await
}

/// Messages as they are on the wire.
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
