//! Namespaces.

use std::collections::{BTreeMap, BTreeSet};

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use lake_client::catalog::{CatalogError, Namespace};
use lake_client::store::Applied;
use serde::Deserialize;
use serde_json::json;

use super::Rest;
use super::error::{RestError, Result, json_response, unless_made};
use super::request::Call;

#[derive(Debug, Deserialize)]
struct Create {
    namespace: Vec<String>,
    #[serde(default)]
    properties: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Deserialize)]
struct Update {
    #[serde(default)]
    removals: Option<BTreeSet<String>>,
    #[serde(default)]
    updates: Option<BTreeMap<String, String>>,
}

/// The namespaces directly under `parent`, or those that are under none.
pub async fn list(rest: &Rest, call: &Call) -> Result<Response> {
    let parent = call.parameter("parent").filter(|text| !text.is_empty());
    let parent = match parent {
        Some(text) => Some(call.levels(text, "parent")?),
        None => call.root()?,
    };
    let all = rest.tables.metadata.list_namespaces(call.deadline).await?;
    if let Some(parent) = &parent
        && !all.contains(parent)
    {
        return Err(CatalogError::NamespaceNotFound(parent.clone()).into());
    }
    let children = all.into_iter().filter(|namespace| namespace.parent() == parent).collect();
    let (page, next) = call.page(children, |namespace: &Namespace| namespace.levels().join("\u{1f}"))?;
    let namespaces: Vec<_> = page.iter().map(|namespace| call.told(namespace)).collect();
    Ok(ok(json!({"namespaces": namespaces, "next-page-token": next})))
}

pub async fn create(rest: &Rest, call: &Call) -> Result<Response> {
    let body: Create = call.json()?;
    let namespace = call.namespace_of(body.namespace, "namespace")?;
    let properties = body.properties.unwrap_or_default();
    rest.writer(call, StatusCode::OK, None)?.create_namespace(&namespace, properties, call.deadline).await?;
    created(call)
}

/// The answer to who has created a namespace.
pub fn created(call: &Call) -> Result<Response> {
    let body: Create = call.json()?;
    Ok(ok(json!({"namespace": body.namespace, "properties": body.properties.unwrap_or_default()})))
}

pub async fn load(rest: &Rest, call: &Call) -> Result<Response> {
    let namespace = call.namespace()?;
    let properties = rest.tables.metadata.namespace_properties(&namespace, call.deadline).await?;
    let properties = properties.ok_or_else(|| CatalogError::NamespaceNotFound(namespace.clone()))?;
    Ok(ok(json!({"namespace": call.told(&namespace), "properties": properties})))
}

pub async fn exists(rest: &Rest, call: &Call) -> Result<Response> {
    let namespace = call.namespace()?;
    match rest.tables.metadata.namespace_exists(&namespace, call.deadline).await? {
        true => Ok(StatusCode::NO_CONTENT.into_response()),
        false => Err(CatalogError::NamespaceNotFound(namespace).into()),
    }
}

pub async fn drop(rest: &Rest, call: &Call) -> Result<Response> {
    let namespace = call.namespace()?;
    let dropped = rest.writer(call, StatusCode::NO_CONTENT, None)?.drop_namespace(&namespace, call.deadline).await;
    let gone = async { matches!(rest.tables.metadata.namespace_exists(&namespace, call.deadline).await, Ok(false)) };
    unless_made(dropped, gone).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

pub async fn update(rest: &Rest, call: &Call) -> Result<Response> {
    let body: Update = call.json()?;
    let (removals, updates) = (body.removals.unwrap_or_default(), body.updates.unwrap_or_default());
    if let Some(both) = removals.iter().find(|name| updates.contains_key(*name)) {
        return Err(RestError::unprocessable(format!("property {both:?} is both removed and set")));
    }
    let namespace = call.namespace()?;
    let writer = rest.writer(call, StatusCode::OK, None)?;
    let change = || writer.update_namespace(&namespace, &removals, &updates, call.deadline);
    let changed = match change().await {
        // Made again, it finds what the one without an answer has changed, or keeps that from being made.
        Err(error) if error.applied() == Applied::Unknown => match change().await {
            again @ (Ok(_) | Err(CatalogError::AlreadyDone(_))) => again,
            Err(_) => Err(error),
        },
        changed => changed,
    };
    let removed = changed?;
    let missing: Vec<_> = removals.difference(&removed).collect();
    Ok(ok(json!({"updated": updates.keys().collect::<Vec<_>>(), "removed": removed, "missing": missing})))
}

/// The answer to who sends an update again. Which of the properties that it removed were there is no longer known.
pub fn updated(call: &Call) -> Result<Response> {
    let body: Update = call.json()?;
    let (removals, updates) = (body.removals.unwrap_or_default(), body.updates.unwrap_or_default());
    Ok(ok(json!({"updated": updates.keys().collect::<Vec<_>>(), "removed": removals, "missing": []})))
}

fn ok(body: serde_json::Value) -> Response {
    json_response(StatusCode::OK, body.to_string())
}
