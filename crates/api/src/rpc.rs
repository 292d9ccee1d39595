//! How the services answer calls: each lists its methods in [`serve!`](serve), once.

use std::pin::Pin;

use futures::Stream;
use tonic::Status;

/// The responses of a call that has many.
pub(crate) type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Implements a service of the API with the methods of its type, a line for each method of the
/// protocol.
///
/// - `call` has one request and one response. The method gets the authenticated caller and the
///   message; it returns the response or an [`ApiError`](crate::error::ApiError).
/// - `request` is for streams, and for what else needs the whole request. The method gets it as it
///   came, so it must ask for the caller itself.
/// - `type` is a stream of responses with its message.
///
/// The method of the type has the same name, unless each line ends with the one that answers.
macro_rules! serve {
    (
        $service:ident for $type:ident;
        $(type $stream:ident = $message:ident;)*
        $(request $whole:ident($input:ty) -> $output:ty;)*
        $(call $method:ident($request:ident) -> $response:ident;)*
    ) => {
        $crate::rpc::serve! {
            $service for $type;
            $(type $stream = $message;)*
            $(request $whole($input) -> $output = $whole;)*
            $(call $method($request) -> $response = $method;)*
        }
    };
    (
        $service:ident for $type:ident;
        $(type $stream:ident = $message:ident;)*
        $(request $whole:ident($input:ty) -> $output:ty = $answer:ident;)*
        $(call $method:ident($request:ident) -> $response:ident = $reply:ident;)*
    ) => {
        #[tonic::async_trait]
        impl $service for $type {
            $(type $stream = $crate::rpc::ResponseStream<codelia_proto::v1::$message>;)*

            $(async fn $whole(
                &self,
                request: tonic::Request<$input>,
            ) -> Result<tonic::Response<$output>, tonic::Status> {
                $type::$answer(self, request).await
            })*

            $(async fn $method(
                &self,
                request: tonic::Request<codelia_proto::v1::$request>,
            ) -> Result<tonic::Response<codelia_proto::v1::$response>, tonic::Status> {
                let caller = $crate::auth::caller(request.extensions())?;
                let response = $type::$reply(self, &caller, request.into_inner()).await?;
                Ok(tonic::Response::new(response))
            })*
        }
    };
}

pub(crate) use serve;
