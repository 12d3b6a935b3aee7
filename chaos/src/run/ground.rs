//! A cluster under attack, wherever it runs: what a run needs of it besides what nemeses do.

use std::path::PathBuf;

use async_trait::async_trait;
use lake_client::secret::Secret;
use lake_proto::v1::StatusResponse;

use super::heal;
use super::pulse::Pulse;
use crate::Result;
use crate::check::convergence::Facts;
use crate::nemesis::field::Field;
use crate::workload::access::Roster;

/// See the module.
#[async_trait]
pub trait Ground: Send + Sync + 'static {
    /// The peers that clients may ask.
    fn roster(&self) -> &Roster;

    /// The query nodes that clients may ask.
    fn query_nodes(&self) -> &Roster;

    /// The same, where they serve REST.
    fn rest_nodes(&self) -> Roster {
        Roster::default()
    }

    /// The cluster's secret, if it has one.
    fn secret(&self) -> Option<Secret> {
        None
    }

    /// Where tables' files are, if they are this machine's.
    fn warehouse(&self) -> Option<PathBuf> {
        None
    }

    /// What each peer that answers says of itself.
    async fn statuses(&self) -> Vec<StatusResponse>;

    /// Takes back everything that is wrong with the network.
    ///
    /// # Errors
    /// It cannot be taken back.
    async fn calm(&self) -> Result<()>;

    /// Has everything run that must, and waits for a leader.
    async fn heal(&self, pulse: &Pulse) -> Facts;

    /// Compares the states of all peers once nothing changes any more.
    async fn compare(&self, facts: &mut Facts, pulse: &Pulse);
}

#[async_trait]
impl Ground for Field {
    fn roster(&self) -> &Roster {
        &self.roster
    }

    fn query_nodes(&self) -> &Roster {
        &self.query_nodes
    }

    fn rest_nodes(&self) -> Roster {
        self.rest_nodes.clone()
    }

    fn warehouse(&self) -> Option<PathBuf> {
        self.objects.is_none().then(|| self.cluster.dir().join("warehouse"))
    }

    async fn statuses(&self) -> Vec<StatusResponse> {
        Field::statuses(self).await
    }

    async fn calm(&self) -> Result<()> {
        self.calm_all().await
    }

    async fn heal(&self, pulse: &Pulse) -> Facts {
        heal::heal(self, pulse).await
    }

    async fn compare(&self, facts: &mut Facts, pulse: &Pulse) {
        heal::compare(self, facts, pulse).await;
    }
}
