//! `lake meta watch`: changes under a prefix, as they happen.
//!
//! The client's watch goes on at another peer when one is lost, so that nothing is missing and nothing comes twice; here its
//! messages become lines.

use anyhow::Result;
use lake_client::store::Error;
use lake_proto::kv::Revision;
use lake_proto::watch::{Change, Event};
use serde_json::{Value, json};

use super::EXIT_NO;
use super::cluster::Cluster;
use super::output::{entry_json, escaped, shortened, stream};
use crate::signals::{Interrupts, Termination};

/// Options of `lake meta watch`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
As text each key that changed has a line: the revision, put or delete, the key, the value. As JSON each transaction has a
line. Ctrl-C ends it. A peer that is lost is not noticed: the watch goes on at another one, with nothing missing and nothing
twice. It ends when no peer has served for 30 s.

The last 100,000 changes, or 64 MiB of them, can be watched from. Older ones are gone: list again, and watch from the revision
behind the listing's.

Exit codes: 0 it ended as asked, 3 the changes are no longer kept, 1 it was lost.

Examples:
  lake meta watch /lake/table/
  lake meta watch /kv/ --from 17 --count 1 --format json")]
pub struct Args {
    /// What the keys begin with; empty: all keys
    #[arg(default_value = "")]
    prefix: String,
    /// The first revision wanted; 0: what comes next
    #[arg(long, value_name = "REVISION", default_value_t = 0)]
    from: u64,
    /// End after so many transactions
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Also print up to which revision everything has been told, when that rises
    #[arg(long)]
    progress: bool,
    /// How a change is printed
    #[arg(long, value_enum, default_value_t)]
    format: LineFormat,
}

/// How a change is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
enum LineFormat {
    /// For people
    #[default]
    Text,
    /// One JSON document in a line
    Json,
}

/// Watches until it is told to end, or has to.
///
/// # Errors
/// As every watch.
pub async fn run(cluster: &Cluster, args: Args) -> Result<u8> {
    let (mut interrupts, mut termination) = (Interrupts::listen()?, Termination::listen()?);
    let mut watch = cluster.store()?.watch(&args.prefix, args.from)?;
    let mut told = Told::default();
    let mut left = args.count;
    loop {
        let message = tokio::select! {
            message = watch.next() => message,
            () = interrupts.next() => break,
            () = termination.next() => break,
        };
        let changes = match message {
            Some(Ok(changes)) => changes,
            Some(Err(error @ Error::Compacted { .. })) => {
                eprintln!("lake: {error}");
                return Ok(EXIT_NO);
            }
            Some(Err(error)) => {
                told.say_where_to_go_on();
                return Err(error.into());
            }
            None => break,
        };
        for change in &changes.changes {
            stream(args.format.change(change).as_bytes())?;
            told.up_to(change.revision);
            if let Some(left) = &mut left {
                *left -= 1;
                if *left == 0 {
                    return Ok(0);
                }
            }
        }
        if told.up_to(changes.progress) && args.progress {
            stream(args.format.progress(changes.progress).as_bytes())?;
        }
    }
    told.say_where_to_go_on();
    Ok(0)
}

/// How far everything has been told.
#[derive(Debug, Default)]
struct Told {
    revision: Option<Revision>,
}

impl Told {
    /// Whether that is further than before. The first time it says from where the watch goes.
    fn up_to(&mut self, revision: Revision) -> bool {
        if self.revision.is_none() {
            eprintln!("lake: watching; Ctrl-C ends it");
        }
        let further = self.revision.is_none_or(|before| revision > before);
        self.revision = self.revision.max(Some(revision));
        further
    }

    fn say_where_to_go_on(&self) {
        if let Some(revision) = self.revision {
            eprintln!("lake: everything up to revision {revision} was told; go on with --from {}", revision + 1);
        }
    }
}

impl LineFormat {
    fn change(self, change: &Change) -> String {
        match self {
            Self::Text => change.events.iter().map(|event| text(change.revision, event)).collect(),
            Self::Json => {
                let events: Value = change.events.iter().map(event_json).collect();
                format!("{}\n", json!({ "revision": change.revision, "events": events }))
            }
        }
    }

    fn progress(self, revision: Revision) -> String {
        match self {
            Self::Text => format!("{revision} -\n"),
            Self::Json => format!("{}\n", json!({ "progress": revision })),
        }
    }
}

fn text(revision: Revision, event: &Event) -> String {
    let key = escaped(&event.key);
    match &event.entry {
        Some(entry) => format!("{revision} put {key} {}\n", shortened(&entry.value)),
        None => format!("{revision} delete {key}\n"),
    }
}

fn event_json(event: &Event) -> Value {
    match &event.entry {
        Some(entry) => json!({ "type": "put", "key": event.key, "entry": entry_json(entry) }),
        None => json!({ "type": "delete", "key": event.key }),
    }
}

#[cfg(test)]
mod tests {
    use lake_proto::kv::KeyValue;

    use super::*;

    #[test]
    fn a_transaction_is_a_line_of_json_and_a_line_of_text_per_key() {
        let entry = KeyValue {
            key: "/kv/a".into(),
            value: "1\n2".into(),
            version: 1,
            create_revision: 7,
            mod_revision: 7,
            lease: None,
        };
        let change = Change {
            revision: 7,
            events: vec![Event { key: "/kv/a".into(), entry: Some(entry) }, Event { key: "/kv/b".into(), entry: None }],
        };
        assert_eq!(LineFormat::Text.change(&change), "7 put /kv/a 1\\n2\n7 delete /kv/b\n");
        let json = LineFormat::Json.change(&change);
        assert_eq!(json.lines().count(), 1);
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["events"][0]["entry"]["value"], "1\n2");
        assert_eq!(json["events"][1], json!({ "type": "delete", "key": "/kv/b" }));
        assert_eq!(LineFormat::Json.progress(9), "{\"progress\":9}\n");
    }
}
