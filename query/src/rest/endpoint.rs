//! What is served: one table. Requests are routed by it, clients are told it (`endpoints` of the configuration), and
//! metrics are named by it.

use axum::http::Method;

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    Index,
    OpenApi,
    Metrics,
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
    ReportMetrics,
    LoadCredentials,
    RenameTable,
    CommitTransaction,
    ListViews,
    CreateView,
    RegisterView,
    LoadView,
    ViewExists,
    ReplaceView,
    DropView,
    RenameView,
}

impl Operation {
    /// As programs name it.
    pub fn name(self) -> String {
        let name = format!("{self:?}");
        name[..1].to_ascii_lowercase() + &name[1..]
    }

    /// Whether an answer has no body when all went well.
    pub fn answers_nothing(self) -> bool {
        use Operation::*;
        matches!(
            self,
            NamespaceExists
                | DropNamespace
                | TableExists
                | DropTable
                | RenameTable
                | ReportMetrics
                | CommitTransaction
                | ViewExists
                | DropView
                | RenameView
        )
    }
}

/// One thing that is served.
#[derive(Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub operation: Operation,
    pub method: Method,
    /// As the specification writes it: a part in braces stands for any one part.
    pub path: &'static str,
    /// For people.
    pub summary: &'static str,
}

const fn serve(operation: Operation, method: Method, path: &'static str, summary: &'static str) -> Endpoint {
    Endpoint { operation, method, path, summary }
}

/// Everything that is served.
pub static ENDPOINTS: &[Endpoint] = &[
    serve(Operation::Index, Method::GET, "/", "This page"),
    serve(Operation::OpenApi, Method::GET, "/openapi", "All of this for programs"),
    serve(
        Operation::Metrics,
        Method::GET,
        "/metrics",
        "What this node has served, and asked the metadata, for Prometheus",
    ),
    serve(Operation::GetConfig, Method::GET, "/v1/config", "How this catalog is used"),
    serve(Operation::ListNamespaces, Method::GET, "/v1/{prefix}/namespaces", "List namespaces, or those in one"),
    serve(Operation::CreateNamespace, Method::POST, "/v1/{prefix}/namespaces", "Create a namespace"),
    serve(
        Operation::LoadNamespace,
        Method::GET,
        "/v1/{prefix}/namespaces/{namespace}",
        "The properties of a namespace",
    ),
    serve(
        Operation::NamespaceExists,
        Method::HEAD,
        "/v1/{prefix}/namespaces/{namespace}",
        "Whether there is such a namespace",
    ),
    serve(Operation::DropNamespace, Method::DELETE, "/v1/{prefix}/namespaces/{namespace}", "Drop an empty namespace"),
    serve(
        Operation::UpdateNamespace,
        Method::POST,
        "/v1/{prefix}/namespaces/{namespace}/properties",
        "Set and remove properties of a namespace",
    ),
    serve(Operation::ListTables, Method::GET, "/v1/{prefix}/namespaces/{namespace}/tables", "List tables"),
    serve(
        Operation::CreateTable,
        Method::POST,
        "/v1/{prefix}/namespaces/{namespace}/tables",
        "Create a table, at once or staged",
    ),
    serve(
        Operation::RegisterTable,
        Method::POST,
        "/v1/{prefix}/namespaces/{namespace}/register",
        "A table from metadata that is there",
    ),
    serve(Operation::LoadTable, Method::GET, "/v1/{prefix}/namespaces/{namespace}/tables/{table}", "Load a table"),
    serve(
        Operation::TableExists,
        Method::HEAD,
        "/v1/{prefix}/namespaces/{namespace}/tables/{table}",
        "Whether there is such a table",
    ),
    serve(
        Operation::CommitTable,
        Method::POST,
        "/v1/{prefix}/namespaces/{namespace}/tables/{table}",
        "Commit to a table",
    ),
    serve(Operation::DropTable, Method::DELETE, "/v1/{prefix}/namespaces/{namespace}/tables/{table}", "Drop a table"),
    serve(
        Operation::ReportMetrics,
        Method::POST,
        "/v1/{prefix}/namespaces/{namespace}/tables/{table}/metrics",
        "Report what a scan or a commit took",
    ),
    serve(
        Operation::LoadCredentials,
        Method::GET,
        "/v1/{prefix}/namespaces/{namespace}/tables/{table}/credentials",
        "The keys to a table's objects, where the node lends them",
    ),
    serve(Operation::RenameTable, Method::POST, "/v1/{prefix}/tables/rename", "Rename a table"),
    serve(
        Operation::CommitTransaction,
        Method::POST,
        "/v1/{prefix}/transactions/commit",
        "Commit to several tables at once",
    ),
    serve(Operation::ListViews, Method::GET, "/v1/{prefix}/namespaces/{namespace}/views", "List views"),
    serve(Operation::CreateView, Method::POST, "/v1/{prefix}/namespaces/{namespace}/views", "Create a view"),
    serve(
        Operation::RegisterView,
        Method::POST,
        "/v1/{prefix}/namespaces/{namespace}/register-view",
        "A view from metadata that is there",
    ),
    serve(Operation::LoadView, Method::GET, "/v1/{prefix}/namespaces/{namespace}/views/{view}", "Load a view"),
    serve(
        Operation::ViewExists,
        Method::HEAD,
        "/v1/{prefix}/namespaces/{namespace}/views/{view}",
        "Whether there is such a view",
    ),
    serve(
        Operation::ReplaceView,
        Method::POST,
        "/v1/{prefix}/namespaces/{namespace}/views/{view}",
        "Replace or change a view",
    ),
    serve(Operation::DropView, Method::DELETE, "/v1/{prefix}/namespaces/{namespace}/views/{view}", "Drop a view"),
    serve(Operation::RenameView, Method::POST, "/v1/{prefix}/views/rename", "Rename a view"),
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

    /// Whether it is of the protocol, not of this server.
    pub fn of_the_protocol(&self) -> bool {
        self.path.starts_with("/v1/")
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
            let path = endpoint.path.replace(['{', '}'], "");
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
        assert_eq!(route(&Method::PUT, "/v1/config"), Routed::OtherMethods("GET".into()));
    }
}
