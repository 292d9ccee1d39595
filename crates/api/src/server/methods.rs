//! The public methods and what each demands of its calls, as `proto/` declares it with the option
//! `codelia.v1.access`. No other place says who may call a method.

use std::{collections::HashMap, sync::Arc};

use codelia_proto::{PUBLIC_DESCRIPTORS, v1};
use codelia_store::Scope;
use prost_reflect::{DescriptorError, DescriptorPool, MethodDescriptor};

use crate::wire::validate;

/// The option of a method that has its [`v1::Access`].
const OPTION: &str = "codelia.v1.access";
/// Bytes of a message unless its method declares others.
const MAX_MESSAGE_BYTES: usize = 256 * 1024;

/// Why the descriptors of the API cannot be used: a bug.
#[derive(Debug, thiserror::Error)]
pub enum InvalidMethods {
    /// The descriptors cannot be decoded.
    #[error("cannot decode the API descriptors")]
    Decode(#[from] DescriptorError),
    /// The option of a method is absent or contradicts itself.
    #[error("method {method} does not declare who may call it (option {OPTION})")]
    Undeclared {
        /// The full name of the method.
        method: String,
    },
}

/// All public methods by their paths, such as `/codelia.v1.RunService/StartRun`.
#[derive(Debug)]
pub(crate) struct Methods {
    by_path: HashMap<String, Arc<Method>>,
    services: Vec<String>,
}

/// A method and what it demands of its calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Method {
    pub(crate) callers: Callers,
    /// Maximum bytes of one message of the request.
    pub(crate) max_message_bytes: usize,
    /// Whether a call may stay open as long as a run, or longer.
    pub(crate) stays_open: bool,
    /// Whether the request is a stream of messages.
    pub(crate) is_client_streaming: bool,
}

/// The keys that may call a method.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Callers {
    /// Every valid key.
    All,
    /// Keys with one of the scopes.
    AnyOf(Vec<Scope>),
}

impl Methods {
    /// Reads the descriptors that were compiled into this binary.
    pub(crate) fn load() -> Result<Self, InvalidMethods> {
        Self::from_descriptors(PUBLIC_DESCRIPTORS)
    }

    fn from_descriptors(encoded: &[u8]) -> Result<Self, InvalidMethods> {
        let pool = DescriptorPool::decode(encoded)?;
        let mut methods = Self { by_path: HashMap::new(), services: Vec::new() };
        for service in pool.services() {
            for method in service.methods() {
                let path = format!("/{}/{}", service.full_name(), method.name());
                let declared = Method::declared(&method);
                let undeclared =
                    || InvalidMethods::Undeclared { method: method.full_name().to_owned() };
                methods.by_path.insert(path, Arc::new(declared.ok_or_else(undeclared)?));
            }
            methods.services.push(service.full_name().to_owned());
        }
        Ok(methods)
    }

    /// Full names of the services, such as `codelia.v1.RunService`.
    pub(crate) fn services(&self) -> impl Iterator<Item = &str> {
        self.services.iter().map(String::as_str)
    }

    /// The paths of all methods.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &str> {
        self.by_path.keys().map(String::as_str)
    }

    /// The name of a path in metrics and logs. An unknown path must not become a label.
    pub(crate) fn label<'a>(&self, path: &'a str) -> &'a str {
        if self.by_path.contains_key(path) { path.trim_start_matches('/') } else { "other" }
    }

    /// The method with a path; `None` if the API does not have it.
    pub(crate) fn get(&self, path: &str) -> Option<&Arc<Method>> {
        self.by_path.get(path)
    }
}

impl Method {
    /// What a method declares; `None` if it does not say who may call it.
    fn declared(method: &MethodDescriptor) -> Option<Self> {
        let option = method.parent_pool().get_extension_by_name(OPTION)?;
        let options = method.options();
        let access: v1::Access =
            options.get_extension(&option).as_message()?.transcode_to().ok()?;
        let scopes = access.scopes.iter().map(|&scope| validate::scope(scope).ok());
        let scopes = scopes.collect::<Option<Vec<_>>>()?;
        let callers = match (access.any_key, scopes.is_empty()) {
            (true, true) => Callers::All,
            (false, false) => Callers::AnyOf(scopes),
            _ => return None,
        };
        let max_message_bytes = match access.max_message_bytes {
            0 => MAX_MESSAGE_BYTES,
            bytes => usize::try_from(bytes).ok()?,
        };
        Some(Self {
            callers,
            max_message_bytes,
            stays_open: access.stays_open,
            is_client_streaming: method.is_client_streaming(),
        })
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use prost_reflect::{DynamicMessage, ReflectMessage as _, Value};

    use super::*;

    /// The descriptors after a change of the options of one method.
    fn with_options(method: &str, change: impl Fn(&mut DynamicMessage)) -> Vec<u8> {
        let pool = DescriptorPool::decode(PUBLIC_DESCRIPTORS).unwrap();
        let set = pool.get_message_by_name("google.protobuf.FileDescriptorSet").unwrap();
        let mut set = DynamicMessage::decode(set, PUBLIC_DESCRIPTORS).unwrap();
        for file in children(&mut set, "file") {
            for service in children(file, "service") {
                for found in children(service, "method") {
                    if found.get_field_by_name("name").unwrap().as_str() == Some(method) {
                        let options = found.get_field_by_name_mut("options").unwrap();
                        change(options.as_message_mut().unwrap());
                    }
                }
            }
        }
        set.encode_to_vec()
    }

    fn children<'a>(
        message: &'a mut DynamicMessage,
        field: &str,
    ) -> impl Iterator<Item = &'a mut DynamicMessage> {
        let list = message.get_field_by_name_mut(field).unwrap().as_list_mut().unwrap();
        list.iter_mut().map(|value| value.as_message_mut().unwrap())
    }

    /// Declares another [`v1::Access`].
    fn declare(access: v1::Access) -> impl Fn(&mut DynamicMessage) {
        move |options| {
            let option = options.descriptor().parent_pool().get_extension_by_name(OPTION).unwrap();
            let value = options.get_extension_mut(&option).as_message_mut().unwrap();
            let mut declared = DynamicMessage::new(value.descriptor());
            declared.transcode_from(&access).unwrap();
            options.set_extension(&option, Value::Message(declared));
        }
    }

    #[test]
    fn method_without_access_is_refused_by_name() {
        let run = i32::from(v1::Scope::Run);
        let of = |scopes, any_key| v1::Access { scopes, any_key, ..v1::Access::default() };
        for encoded in [
            with_options("StartRun", |options| {
                *options = DynamicMessage::new(options.descriptor())
            }),
            with_options("StartRun", declare(of(Vec::new(), false))),
            with_options("StartRun", declare(of(vec![0], false))),
            with_options("StartRun", declare(of(vec![run, 99], false))),
            with_options("StartRun", declare(of(vec![run], true))),
        ] {
            match Methods::from_descriptors(&encoded) {
                Err(InvalidMethods::Undeclared { method }) => {
                    assert_eq!(method, "codelia.v1.RunService.StartRun");
                }
                other => panic!("{other:?}"),
            }
        }
        let encoded = with_options("StartRun", declare(of(vec![run], false)));
        assert!(Methods::from_descriptors(&encoded).is_ok(), "the control");
    }

    #[test]
    fn every_method_declares_its_access() {
        let methods = Methods::load().unwrap_or_else(|error| panic!("{error}"));
        assert!(methods.services().any(|name| name == "codelia.v1.RunService"));
        assert!(methods.get("/codelia.v1.RunService/Exec").unwrap().is_client_streaming);
        assert!(!methods.get("/codelia.v1.RunService/WatchRun").unwrap().is_client_streaming);
        assert_eq!(methods.get("/codelia.v1.RunService/Unknown"), None);
    }

    #[test]
    fn only_known_methods_become_labels() {
        let methods = Methods::load().unwrap();
        assert_eq!(
            methods.label("/codelia.v1.RunService/StartRun"),
            "codelia.v1.RunService/StartRun"
        );
        assert_eq!(methods.label("/codelia.v1.RunService/Invented"), "other");
    }

    #[test]
    fn message_of_every_method_can_be_decoded() {
        // The limit of tonic for a message.
        const MAX_DECODED: usize = 4 * 1024 * 1024;
        let methods = Methods::load().unwrap();
        for path in methods.paths() {
            let max = methods.get(path).unwrap().max_message_bytes;
            assert!((MAX_MESSAGE_BYTES..=MAX_DECODED).contains(&max), "{path}: {max}");
        }
    }

    #[test]
    fn only_streams_stay_open() {
        let methods = Methods::load().unwrap();
        let pool = DescriptorPool::decode(PUBLIC_DESCRIPTORS).unwrap();
        let is_stream = |path: &&str| {
            let (service, name) = path.trim_start_matches('/').split_once('/').unwrap();
            let service = pool.get_service_by_name(service).unwrap();
            service.methods().any(|method| method.name() == name && method.is_server_streaming())
        };
        let open: Vec<_> =
            methods.paths().filter(|path| methods.get(path).unwrap().stays_open).collect();
        assert!(!open.is_empty() && open.iter().all(is_stream), "{open:?}");
    }
}
