//! Names of the public services and methods, read from the compiled descriptors.

use codelia_proto::PUBLIC_DESCRIPTORS;
use prost::{DecodeError, Message};
use prost_types::{FileDescriptorSet, MethodDescriptorProto};

/// The descriptors of the public API.
#[derive(Debug)]
pub(crate) struct Descriptors(FileDescriptorSet);

impl Descriptors {
    /// Decodes the descriptors that were compiled into this binary.
    pub(crate) fn decode() -> Result<Self, DecodeError> {
        FileDescriptorSet::decode(PUBLIC_DESCRIPTORS).map(Self)
    }

    /// Full names of the services, such as `codelia.v1.RunService`.
    pub(crate) fn services(&self) -> impl Iterator<Item = String> {
        self.0.file.iter().flat_map(|file| {
            file.service.iter().map(|service| format!("{}.{}", file.package(), service.name()))
        })
    }

    /// Paths of the methods, such as `/codelia.v1.RunService/StartRun`.
    pub(crate) fn method_paths(&self) -> impl Iterator<Item = String> {
        self.methods().map(|(path, _)| path)
    }

    /// Paths of the methods whose request is a stream.
    pub(crate) fn client_streaming_paths(&self) -> impl Iterator<Item = String> {
        self.methods().filter(|(_, method)| method.client_streaming()).map(|(path, _)| path)
    }

    fn methods(&self) -> impl Iterator<Item = (String, &MethodDescriptorProto)> {
        self.0.file.iter().flat_map(|file| {
            file.service.iter().flat_map(|service| {
                let path = |method: &str| format!("/{}.{}/{method}", file.package(), service.name());
                service.method.iter().map(move |method| (path(method.name()), method))
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_and_methods_have_full_names() {
        let descriptors = Descriptors::decode().unwrap();
        assert!(descriptors.services().any(|name| name == "codelia.v1.RunService"));
        assert!(descriptors.method_paths().any(|path| path == "/codelia.v1.RunService/StartRun"));
        let streaming: Vec<_> = descriptors.client_streaming_paths().collect();
        assert!(streaming.contains(&"/codelia.v1.RunService/Exec".to_owned()), "{streaming:?}");
        assert!(!streaming.contains(&"/codelia.v1.RunService/WatchRun".to_owned()), "{streaming:?}");
    }
}
