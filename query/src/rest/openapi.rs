//! What is served, described for programs (OpenAPI) and for people (a page), both made of the table of endpoints.

use axum::http::StatusCode;
use axum::response::{Html, IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::endpoint::{ENDPOINTS, Endpoint, Operation};
use super::error::json_response;
use super::{MAX_BODY_BYTES, WAREHOUSE, once};

/// The OpenAPI document.
pub fn document() -> Response {
    json_response(StatusCode::OK, described().to_string())
}

fn described() -> Value {
    let mut paths = Map::new();
    for endpoint in ENDPOINTS {
        let operation = operation(endpoint);
        let path = paths.entry(endpoint.path.to_owned()).or_insert_with(|| json!({}));
        path[endpoint.method.as_str().to_ascii_lowercase()] = operation;
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "lake: the Iceberg REST catalog",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Bodies are those of the Apache Iceberg REST catalog specification.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "externalDocs": {"url": "https://iceberg.apache.org/rest-catalog-spec/"},
        "servers": [{"url": "/"}],
        "security": [{}, {"secret": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"secret": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": {
                "type": "object",
                "required": ["error"],
                "properties": {"error": {
                    "type": "object",
                    "required": ["message", "type", "code"],
                    "properties": {
                        "message": {"type": "string"},
                        "type": {"type": "string"},
                        "code": {"type": "integer"},
                    },
                }},
            }},
        },
    })
}

fn operation(endpoint: &Endpoint) -> Value {
    let in_path = endpoint.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    let mut parameters: Vec<Value> = in_path
        .map(|name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}))
        .collect();
    for name in queried(endpoint.operation) {
        parameters.push(json!({"name": name, "in": "query", "required": false, "schema": {"type": "string"}}));
    }
    if endpoint.changes() {
        let schema = json!({"type": "string", "format": "uuid"});
        parameters.push(json!({"name": "Idempotency-Key", "in": "header", "required": false, "schema": schema}));
    }
    let failed = json!({
        "description": "It failed; the type says why",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    });
    let empty = endpoint.operation.answers_nothing();
    let (status, description) = if empty { ("204", "Done") } else { ("200", "What was asked for") };
    let mut done = json!({"description": description});
    if !empty {
        let media = match endpoint.operation {
            Operation::Index => "text/html",
            Operation::Metrics => "text/plain",
            _ => "application/json",
        };
        done["content"] = json!({media: {}});
    }
    let mut operation = json!({
        "operationId": endpoint.operation.name(),
        "summary": endpoint.summary,
        "parameters": parameters,
        "responses": {status: done, "default": failed},
    });
    if endpoint.method == axum::http::Method::POST {
        operation["requestBody"] = json!({
            "required": true,
            "content": {"application/json": {"schema": {"type": "object"}}},
        });
    }
    operation
}

/// The parameters that are looked at in a query.
fn queried(operation: Operation) -> &'static [&'static str] {
    match operation {
        Operation::GetConfig => &["warehouse"],
        Operation::ListNamespaces => &["parent", "pageToken", "pageSize"],
        Operation::ListTables | Operation::ListViews => &["pageToken", "pageSize"],
        Operation::LoadTable => &["snapshots"],
        Operation::DropTable => &["purgeRequested"],
        _ => &[],
    }
}

/// The page for people.
pub fn page() -> Response {
    let rows: String = ENDPOINTS
        .iter()
        .map(|endpoint| {
            let (method, path, summary) = (&endpoint.method, endpoint.path, endpoint.summary);
            format!("<tr><td>{method}</td><td><code>{path}</code></td><td>{summary}</td></tr>\n")
        })
        .collect();
    let megabytes = MAX_BODY_BYTES >> 20;
    let lifetime = once::LIFETIME.as_secs() / 60;
    let version = env!("CARGO_PKG_VERSION");
    Html(format!(
        r#"<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>lake: the Iceberg REST catalog</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }}
pre {{ background: #8882; padding: 0.8rem; overflow-x: auto; }}
table {{ border-collapse: collapse; }}
td {{ padding: 0.15rem 0.8rem 0.15rem 0; vertical-align: top; }}
</style>
</head>
<body>
<h1>lake {version}</h1>
<p>This query node serves the <a href="https://iceberg.apache.org/rest-catalog-spec/">Iceberg REST catalog</a>.
The warehouse is <code>{WAREHOUSE}</code>. With a cluster secret, that is the token.</p>
<pre>from pyiceberg.catalog import load_catalog
lake = load_catalog("lake", type="rest", uri="<span class="here">http://this-address</span>", warehouse="{WAREHOUSE}")</pre>
<pre>ATTACH '{WAREHOUSE}' AS lake (TYPE iceberg, ENDPOINT '<span class="here">http://this-address</span>', AUTHORIZATION_TYPE 'none');</pre>
<table>
{rows}</table>
<p>For programs: <a href="openapi">OpenAPI</a>, <a href="metrics">metrics</a>. A body has at most {megabytes} MiB; an
idempotency key is good for {lifetime} minutes.</p>
<script>for (const here of document.getElementsByClassName("here")) here.textContent = location.origin;</script>
</body>
</html>
"#
    ))
    .into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_endpoint_is_described_once() {
        let document = described();
        let paths = document["paths"].as_object().unwrap();
        let described: usize = paths.values().map(|path| path.as_object().unwrap().len()).sum();
        assert_eq!(described, ENDPOINTS.len());
        let mut ids: Vec<_> = ENDPOINTS.iter().map(|endpoint| endpoint.operation.name()).collect();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), ENDPOINTS.len(), "an id is one operation's");
        let load = &paths["/v1/{prefix}/namespaces/{namespace}/tables/{table}"]["get"];
        let names: Vec<_> =
            load["parameters"].as_array().unwrap().iter().map(|p| p["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["prefix", "namespace", "table", "snapshots"]);
    }
}
