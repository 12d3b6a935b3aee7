//! What is served: one table. Requests are routed by it, clients are told it (`endpoints` of the configuration), and
//! metrics are named by it.

use axum::http::Method;

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    GetConfig,
    ListNamespaces,
    CreateNamespace,
    LoadNamespace,
    NamespaceExists,
    DropNamespace,
    UpdateNamespace,
    ListTables,
    CreateTable,
    RegisterTable,
    LoadTable,
    TableExists,
    CommitTable,
    DropTable,
    RenameTable,
    ReportMetrics,
}

/// One thing that is served.
#[derive(Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub operation: Operation,
    pub method: Method,
    /// As the specification writes it: a part in braces stands for any one part.
    pub path: &'static str,
}

const fn serve(operation: Operation, method: Method, path: &'static str) -> Endpoint {
    Endpoint { operation, method, path }
}

/// Everything that is served.
pub static ENDPOINTS: &[Endpoint] = &[
    serve(Operation::GetConfig, Method::GET, "/v1/config"),
    serve(Operation::ListNamespaces, Method::GET, "/v1/{prefix}/namespaces"),
    serve(Operation::CreateNamespace, Method::POST, "/v1/{prefix}/namespaces"),
    serve(Operation::LoadNamespace, Method::GET, "/v1/{prefix}/namespaces/{namespace}"),
    serve(Operation::NamespaceExists, Method::HEAD, "/v1/{prefix}/namespaces/{namespace}"),
    serve(Operation::DropNamespace, Method::DELETE, "/v1/{prefix}/namespaces/{namespace}"),
    serve(Operation::UpdateNamespace, Method::POST, "/v1/{prefix}/namespaces/{namespace}/properties"),
    serve(Operation::ListTables, Method::GET, "/v1/{prefix}/namespaces/{namespace}/tables"),
    serve(Operation::CreateTable, Method::POST, "/v1/{prefix}/namespaces/{namespace}/tables"),
    serve(Operation::RegisterTable, Method::POST, "/v1/{prefix}/namespaces/{namespace}/register"),
    serve(Operation::LoadTable, Method::GET, "/v1/{prefix}/namespaces/{namespace}/tables/{table}"),
    serve(Operation::TableExists, Method::HEAD, "/v1/{prefix}/namespaces/{namespace}/tables/{table}"),
    serve(Operation::CommitTable, Method::POST, "/v1/{prefix}/namespaces/{namespace}/tables/{table}"),
    serve(Operation::DropTable, Method::DELETE, "/v1/{prefix}/namespaces/{namespace}/tables/{table}"),
    serve(Operation::ReportMetrics, Method::POST, "/v1/{prefix}/namespaces/{namespace}/tables/{table}/metrics"),
    serve(Operation::RenameTable, Method::POST, "/v1/{prefix}/tables/rename"),
];

/// What a path's parts stand for, decoded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Captures(Vec<(&'static str, String)>);

impl Captures {
    /// What stands where the path has `{name}`; empty if it has no such part.
    pub fn get(&self, name: &str) -> &str {
        self.0.iter().find(|(at, _)| *at == name).map_or("", |(_, value)| value)
    }
}

/// What a request's method and path mean.
#[derive(Debug, PartialEq, Eq)]
pub enum Routed {
    To(&'static Endpoint, Captures),
    /// These methods are served at the path.
    OtherMethods(String),
    Nothing,
    /// A part of the path is not the encoding of a text.
    Undecodable,
}

impl Endpoint {
    /// Whether a request that fails in doubt may have changed something.
    pub fn changes(&self) -> bool {
        !matches!(self.method, Method::GET | Method::HEAD) && self.operation != Operation::ReportMetrics
    }

    /// As the configuration lists it.
    pub fn advertised(&self) -> String {
        format!("{} {}", self.method, self.path)
    }
}

/// Finds what a request asks for.
pub fn route(method: &Method, path: &str) -> Routed {
    let parts: Vec<&str> = path.strip_prefix('/').unwrap_or(path).split('/').collect();
    let mut others = Vec::new();
    for endpoint in ENDPOINTS {
        let template: Vec<&'static str> = endpoint.path[1..].split('/').collect();
        let fits = template.len() == parts.len()
            && template.iter().zip(&parts).all(|(template, part)| match name_of(template) {
                Some(_) => !part.is_empty(),
                None => template == part,
            });
        if !fits {
            continue;
        }
        if endpoint.method != *method {
            others.push(endpoint.method.as_str());
            continue;
        }
        let captured = template.iter().zip(&parts).filter_map(|(template, part)| Some((name_of(template)?, part)));
        let decoded = captured.map(|(name, part)| Some((name, decode(part)?))).collect::<Option<_>>();
        return decoded.map_or(Routed::Undecodable, |decoded| Routed::To(endpoint, Captures(decoded)));
    }
    match others.is_empty() {
        true => Routed::Nothing,
        false => Routed::OtherMethods(others.join(", ")),
    }
}

fn name_of(template: &'static str) -> Option<&'static str> {
    template.strip_prefix('{')?.strip_suffix('}')
}

/// A part of a path, as clients encode it: `%XX` is a byte, and `+` a space, which those in Java send.
fn decode(part: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(part.len());
    let mut rest = part.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digit = |byte: u8| char::from(byte).to_digit(16);
                let (high, low) = (digit(rest.next()?)?, digit(rest.next()?)?);
                (high * 16 + low) as u8
            }
            b'+' => b' ',
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(method: Method, path: &str) -> Option<(Operation, Captures)> {
        match route(&method, path) {
            Routed::To(endpoint, captures) => Some((endpoint.operation, captures)),
            _ => None,
        }
    }

    #[test]
    fn every_endpoint_is_found_under_its_own_path() {
        for endpoint in ENDPOINTS {
            let path = endpoint.path.replace('{', "").replace('}', "");
            assert_eq!(at(endpoint.method.clone(), &path).map(|(operation, _)| operation), Some(endpoint.operation));
        }
    }

    #[test]
    fn names_are_decoded_as_clients_encode_them() {
        let (operation, captures) = at(Method::GET, "/v1/lake/namespaces/a%1Fb+c/tables/%C3%BC%2F%2B").unwrap();
        assert_eq!(operation, Operation::LoadTable);
        assert_eq!((captures.get("namespace"), captures.get("table")), ("a\u{1f}b c", "ü/+"));
        for wrong in ["%", "%4", "%zz", "%ff", "%+1"] {
            let path = format!("/v1/lake/namespaces/{wrong}");
            assert_eq!(route(&Method::GET, &path), Routed::Undecodable, "{wrong}");
        }
    }

    #[test]
    fn what_is_not_served_is_told_apart() {
        assert_eq!(route(&Method::GET, "/v1/lake/nothing"), Routed::Nothing);
        assert_eq!(route(&Method::GET, "/v1/lake/namespaces/"), Routed::Nothing);
        assert_eq!(route(&Method::GET, ""), Routed::Nothing);
        assert_eq!(route(&Method::PUT, "/v1/config"), Routed::OtherMethods("GET".into()));
    }
}
