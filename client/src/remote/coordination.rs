//! Leases, sessions, scopes and quotas of the cluster, typed (semantics, sections 4 to 6).
//!
//! Granting and revoking a lease and setting a quota are requests of this client's session, as transactions are
//! ([`super::session`]). Opening a session is sent again when an answer was lost: at worst that leaves one that nobody knows and
//! that ends by itself. Closing one may be sent twice without harm; `existed` is then false if the first attempt did it.

use std::time::{Duration, Instant};

use lake_proto::coordination::{
    LeaseId, Scope, SessionId, Stamp, validate_holder, validate_lease_ttl, validate_session_ttl,
};
use lake_proto::kv::Txn;
use lake_proto::v1;
use lake_proto::v1::leases_client::LeasesClient;
use lake_proto::v1::pipeline_request::Request as Piped;
use lake_proto::v1::quotas_client::QuotasClient;
use lake_proto::v1::scopes_client::ScopesClient;
use lake_proto::v1::sessions_client::SessionsClient;

use super::attempts::Rules;
use super::{RemoteStore, doing, revision, txn_answer, txn_result, wire_options};
use crate::clock;
pub use crate::store::Lease;
use crate::store::{Applied, Committed, Error, MetaStore, Read, ReadOptions, Snapshot};

/// What is told of a live lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LiveLease {
    pub id: LeaseId,
    pub ttl: Duration,
    /// Who holds it, for people.
    pub holder: String,
    /// How many keys hang on it.
    pub keys: u64,
    /// How long until it expires unless renewed; told by a leader on duty only.
    pub remaining: Option<Duration>,
}

/// A part of a listing, and whether there is more behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part<T> {
    pub items: Vec<T>,
    pub more: bool,
}

/// A limit on the bytes of keys and values under a prefix; the empty one is the whole map's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quota {
    pub prefix: String,
    pub limit_bytes: u64,
    pub used_bytes: u64,
}

fn millis(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX)
}

/// Every part of a listing of a snapshot.
async fn parts_of<T>(
    snapshot: Snapshot,
    part: &impl AsyncFn(Option<&T>, ReadOptions) -> Result<Read<Part<T>>, Error>,
) -> Result<Read<Vec<T>>, Error> {
    let mut all = Vec::new();
    loop {
        let read = part(all.last(), ReadOptions::at(snapshot)).await?;
        all.extend(read.value.items);
        if !read.value.more {
            return Ok(Read { revision: read.revision, value: all });
        }
    }
}

impl RemoteStore {
    /// Grants a lease. Keep it alive with a [`super::keeper::LeaseKeeper`], or it ends after its time to live.
    ///
    /// # Errors
    /// `Invalid` for a time to live or a name beyond the limits; as every call.
    pub async fn grant_lease(&self, ttl: Duration, holder: &str, deadline: Instant) -> Result<Lease, Error> {
        validate_lease_ttl(millis(ttl))?;
        validate_holder(holder)?;
        loop {
            let asked = clock::now();
            let grant = async |stamp: Option<Stamp>, address: String, timeout| {
                let stamp = stamp.map(Into::into);
                let message = v1::GrantLeaseRequest { ttl_ms: millis(ttl), holder: holder.to_owned(), stamp };
                let request = self.inner.request(message, timeout)?;
                Ok(LeasesClient::new(self.inner.channel(&address)?).grant(request).await?.into_inner())
            };
            let (answer, _) = self.mutate("granting a lease", deadline, Rules::RESENDABLE, grant).await?;
            let lease = Lease { id: answer.id, ttl, held_until: asked + ttl };
            // One whose answer took so long may be over: it ends by itself, and is of no use.
            let now = clock::now();
            if now < lease.held_until || now >= deadline {
                return Ok(lease);
            }
        }
    }

    /// Ends a lease, deletes the keys that hang on it and releases its scopes. Says whether there was one.
    ///
    /// # Errors
    /// As every call.
    pub async fn revoke_lease(&self, id: LeaseId, deadline: Instant) -> Result<bool, Error> {
        let revoke = async |stamp: Option<Stamp>, address: String, timeout| {
            let message = v1::RevokeLeaseRequest { id, stamp: stamp.map(Into::into) };
            let request = self.inner.request(message, timeout)?;
            Ok(LeasesClient::new(self.inner.channel(&address)?).revoke(request).await?.into_inner())
        };
        let doing = format!("revoking lease {id}");
        let (answer, _) = self.mutate(&doing, deadline, Rules::RESENDABLE, revoke).await?;
        Ok(answer.existed)
    }

    /// Live leases in order of their ids, behind the id `after` (0: from the first). At most `limit`; 0 means the most that
    /// there can be in one answer.
    ///
    /// # Errors
    /// As every read.
    pub async fn list_leases(
        &self,
        after: LeaseId,
        limit: u32,
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<Read<Part<LiveLease>>, Error> {
        let message = v1::ListLeasesRequest { after, limit, options: Some(wire_options(options)) };
        let answer = self
            .read("listing the leases".to_owned(), deadline, async |address, timeout| {
                let request = self.inner.request(message, timeout)?;
                Ok(LeasesClient::new(self.inner.channel(&address)?).list(request).await?.into_inner())
            })
            .await?;
        let lease = |lease: v1::Lease| LiveLease {
            id: lease.id,
            ttl: Duration::from_millis(lease.ttl_ms),
            holder: lease.holder,
            keys: lease.keys,
            remaining: lease.remaining_ms.map(Duration::from_millis),
        };
        let items = answer.leases.into_iter().map(lease).collect();
        Ok(Read { revision: revision(answer.header), value: Part { items, more: answer.more } })
    }

    /// Every live lease, at one revision; starts again if the snapshot ends in the middle. There can be 100,000.
    ///
    /// # Errors
    /// As every read.
    pub async fn all_leases(&self, options: ReadOptions, deadline: Instant) -> Result<Read<Vec<LiveLease>>, Error> {
        self.all_parts(options, deadline, async |last: Option<&LiveLease>, options| {
            self.list_leases(last.map_or(0, |lease| lease.id), 0, options, deadline).await
        })
        .await
    }

    /// One lease, if it is alive.
    ///
    /// # Errors
    /// As every read.
    pub async fn lease(
        &self,
        id: LeaseId,
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<Read<Option<LiveLease>>, Error> {
        let read = self.list_leases(id.saturating_sub(1), 1, options, deadline).await?;
        Ok(Read { revision: read.revision, value: read.value.items.into_iter().find(|lease| lease.id == id) })
    }

    /// Every part of a listing, at one revision: of a snapshot, if there is more than one.
    async fn all_parts<T>(
        &self,
        options: ReadOptions,
        deadline: Instant,
        part: impl AsyncFn(Option<&T>, ReadOptions) -> Result<Read<Part<T>>, Error>,
    ) -> Result<Read<Vec<T>>, Error> {
        let first = part(None, options).await?;
        if !first.value.more {
            return Ok(Read { revision: first.revision, value: first.value.items });
        }
        loop {
            let snapshot = match options.snapshot {
                Some(snapshot) => snapshot,
                None => self.open_snapshot(options, deadline).await?.value,
            };
            let all = parts_of(snapshot, &part).await;
            if options.snapshot.is_some() {
                return all;
            }
            // One that is not closed ends by itself.
            let _ = self.close_snapshot(snapshot, deadline).await;
            match all {
                Err(Error::SnapshotExpired { .. }) if clock::now() < deadline => {}
                all => return all,
            }
        }
    }

    /// Opens a session that may be silent for `ttl`.
    ///
    /// # Errors
    /// `Invalid` for a time to live or a name beyond the limits; as every call.
    pub async fn open_session(&self, ttl: Duration, holder: &str, deadline: Instant) -> Result<SessionId, Error> {
        validate_session_ttl(millis(ttl))?;
        validate_holder(holder)?;
        let message = v1::OpenSessionRequest { ttl_ms: millis(ttl), holder: holder.to_owned() };
        let (answer, _) = self
            .on_leader("opening a session", deadline, Rules::RESENDABLE, async |address, timeout| {
                let request = self.inner.request(message.clone(), timeout)?;
                Ok(SessionsClient::new(self.inner.channel(&address)?).open(request).await?.into_inner())
            })
            .await?;
        Ok(answer.id)
    }

    /// Closes a session. Says whether there was one.
    ///
    /// # Errors
    /// As every call.
    pub async fn close_session(&self, id: SessionId, deadline: Instant) -> Result<bool, Error> {
        let message = v1::CloseSessionRequest { id };
        let (answer, _) = self
            .on_leader(&format!("closing session {id}"), deadline, Rules::RESENDABLE, async |address, timeout| {
                let request = self.inner.request(message, timeout)?;
                Ok(SessionsClient::new(self.inner.channel(&address)?).close(request).await?.into_inner())
            })
            .await?;
        Ok(answer.existed)
    }

    /// Runs a transaction as one request of a session of the caller's own: however often it is sent, by this call or by
    /// repeating it with the same stamp, it is applied at most once, and every answer is that of the first time (semantics,
    /// section 4). A plain commit does that by itself; this is for who must send the same request again in another call.
    ///
    /// # Errors
    /// As every commit. `SessionExpired`: nothing ran; but an earlier call with this stamp, if there was one, may have been
    /// applied.
    pub async fn commit_stamped(&self, txn: Txn, stamp: Stamp, deadline: Instant) -> Result<Committed, Error> {
        stamp.validate()?;
        txn.validate()?;
        let (doing, message) = (doing(&txn), v1::TxnRequest { txn: Some(txn.into()), stamp: Some(stamp.into()) });
        let (answer, _) = self
            .on_leader(&doing, deadline, Rules::STAMPED, async |address, timeout| {
                self.inner.piped(&address, Piped::Txn(message.clone()), timeout, txn_answer).await
            })
            .await?;
        Ok(Committed { result: txn_result(doing, answer)?, resent: false })
    }

    /// Live scopes whose path begins with `prefix`, in order, behind the path `after` (empty: from the first). At most
    /// `limit`; 0 means the most that there can be in one answer.
    ///
    /// # Errors
    /// As every read.
    pub async fn list_scopes(
        &self,
        prefix: &str,
        after: &str,
        limit: u32,
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<Read<Part<Scope>>, Error> {
        let doing = format!("listing the scopes under {prefix:?}");
        let message = v1::ListScopesRequest {
            prefix: prefix.to_owned(),
            after: after.to_owned(),
            limit,
            options: Some(wire_options(options)),
        };
        let answer = self
            .read(doing.clone(), deadline, async |address, timeout| {
                let request = self.inner.request(message.clone(), timeout)?;
                Ok(ScopesClient::new(self.inner.channel(&address)?).list(request).await?.into_inner())
            })
            .await?;
        let scopes = answer.scopes.into_iter().map(Scope::try_from).collect::<Result<_, _>>();
        let items = scopes.map_err(|e| Error::Internal {
            doing,
            message: format!("the peer's answer cannot be read: {e}"),
            applied: Applied::No,
        })?;
        Ok(Read { revision: revision(answer.header), value: Part { items, more: answer.more } })
    }

    /// Every live scope whose path begins with `prefix`, at one revision; starts again if the snapshot ends in the middle.
    /// There can be 100,000.
    ///
    /// # Errors
    /// As every read.
    pub async fn all_scopes(
        &self,
        prefix: &str,
        options: ReadOptions,
        deadline: Instant,
    ) -> Result<Read<Vec<Scope>>, Error> {
        self.all_parts(options, deadline, async |last: Option<&Scope>, options| {
            self.list_scopes(prefix, last.map_or("", |scope| &scope.path), 0, options, deadline).await
        })
        .await
    }

    /// Limits the bytes of keys and values under a prefix (empty: of the whole map); `None` lifts the limit.
    ///
    /// # Errors
    /// As every call.
    pub async fn set_quota(&self, prefix: &str, bytes: Option<u64>, deadline: Instant) -> Result<(), Error> {
        let set = async |stamp: Option<Stamp>, address: String, timeout| {
            let message = v1::SetQuotaRequest { prefix: prefix.to_owned(), bytes, stamp: stamp.map(Into::into) };
            let request = self.inner.request(message, timeout)?;
            Ok(QuotasClient::new(self.inner.channel(&address)?).set(request).await?.into_inner())
        };
        // Without a session it is not sent again: that might undo what another client has set since.
        self.mutate(&format!("setting the quota of {prefix:?}"), deadline, Rules::ONCE, set).await?;
        Ok(())
    }

    /// All quotas.
    ///
    /// # Errors
    /// As every read.
    pub async fn quotas(&self, options: ReadOptions, deadline: Instant) -> Result<Read<Vec<Quota>>, Error> {
        let message = v1::ListQuotasRequest { options: Some(wire_options(options)) };
        let answer = self
            .read("listing the quotas".to_owned(), deadline, async |address, timeout| {
                let request = self.inner.request(message, timeout)?;
                Ok(QuotasClient::new(self.inner.channel(&address)?).list(request).await?.into_inner())
            })
            .await?;
        let quota = |q: v1::Quota| Quota { prefix: q.prefix, limit_bytes: q.limit_bytes, used_bytes: q.used_bytes };
        let value = answer.quotas.into_iter().map(quota).collect();
        Ok(Read { revision: revision(answer.header), value })
    }
}
