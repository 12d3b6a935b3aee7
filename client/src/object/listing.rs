//! The names of a listing: asked for once, and kept for the pages that follow.

use std::sync::PoisonError;
use std::time::Instant;

use futures::TryStreamExt;

use super::ObjectMetaStore;
use super::failure::{is_final, late, refused};
use crate::backoff::Backoff;
use crate::clock;
use crate::store::{Applied, Error};

/// Listings whose next page needs no list of all names; the oldest gives way.
const MAX_LISTINGS_HELD: usize = 4;
/// One with more names asks for them again at each page.
const MAX_NAMES_HELD: usize = 500_000;

/// The names behind a page that was given.
#[derive(Debug)]
pub(super) struct Listing {
    prefix: String,
    /// The key that the page ended with, which is its token.
    last: String,
    rest: Vec<String>,
}

impl ObjectMetaStore {
    /// The names of what is under a prefix, in key order, behind the key `after`.
    pub(super) async fn keys_under(
        &self,
        doing: &str,
        prefix: &str,
        after: Option<&str>,
        deadline: Instant,
    ) -> Result<Vec<String>, Error> {
        let dir = self.dir(prefix.rsplit_once('/').map(|(dirs, _)| dirs));
        let (started, mut backoff, mut attempts) = (clock::now(), Backoff::default(), 0);
        let names = loop {
            attempts += 1;
            let names = self.objects.list((!dir.as_ref().is_empty()).then_some(&dir)).try_collect::<Vec<_>>();
            match tokio::time::timeout_at(deadline.into(), names).await.unwrap_or_else(|_| Err(late())) {
                Ok(names) => break names,
                Err(object_store::Error::NotFound { .. }) => break Vec::new(),
                Err(e) if is_final(&e) => return Err(refused(doing, e)),
                Err(e) if !backoff.wait(deadline).await => {
                    return Err(self.unavailable(doing, started, attempts, &e, Applied::No));
                }
                Err(_) => {}
            }
        };
        let mut keys: Vec<_> = names.into_iter().filter_map(|object| self.key(&object.location)).collect();
        keys.retain(|key| key.starts_with(prefix) && after.is_none_or(|after| key.as_str() > after));
        keys.sort_unstable();
        Ok(keys)
    }

    /// Keeps the names behind a page, so that the next one need not ask for all of them again.
    pub(super) fn hold(&self, prefix: &str, last: &str, rest: Vec<String>) {
        if rest.len() <= MAX_NAMES_HELD {
            let mut held = self.listings.lock().unwrap_or_else(PoisonError::into_inner);
            held.truncate(MAX_LISTINGS_HELD - 1);
            held.insert(0, Listing { prefix: prefix.to_owned(), last: last.to_owned(), rest });
        }
    }

    /// The names behind a page, if they are held.
    pub(super) fn taken_up(&self, prefix: &str, last: &str) -> Option<Vec<String>> {
        let mut held = self.listings.lock().unwrap_or_else(PoisonError::into_inner);
        let at = held.iter().position(|listing| listing.prefix == prefix && listing.last == last)?;
        Some(held.remove(at).rest)
    }
}
