//! An existing cluster, as its operator describes it: where its peers and query nodes are, and the commands that start, stop and
//! hurt them. ssh, systemd, kubectl or plain `kill` do the work; here it is only text for a shell.
//!
//! ```toml
//! [[peers]]
//! id = 1
//! address = "10.0.0.1:9191"
//! host = "db1"
//!
//! [[query_nodes]]
//! id = 1
//! address = "10.0.0.1:9393"
//!
//! [commands]
//! kill = "ssh {host} systemctl kill --signal=KILL lake-{role}"
//! start = "ssh {host} systemctl start lake-{role}"
//! ```
//! `secret_file` before that names a file with the cluster's secret. In a command `{role}` is `metasrv` or `query`, `{id}`, `{address}` and `{host}` are the process's, `{others}` the hosts of the other
//! peers (of a query node: of all peers), `{out}` a directory for what is collected, and `{seconds}` by how much a clock is to be wrong. Whatever else stands in braces is the shell's.
//!
//! Invariants: what fills a gap has no character that means anything to a shell; every command ends within [`COMMAND_WITHIN`], and is
//! written down with what it printed.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use lake_client::secret::Secret;
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Deserialize;
use tokio::io::AsyncWriteExt;

use crate::process::{ProcessName, Role};
use crate::{Error, IoContext, Result};

/// How long a command may take.
pub const COMMAND_WITHIN: Duration = Duration::from_secs(60);
/// Where commands are written down, in the run's directory.
pub const LOG_FILE: &str = "commands.log";
/// By how much clocks are put wrong, either way.
const CLOCK_OFF_S: i64 = 3_600;
/// Most processes of a role.
const MAX_HOSTS: usize = 32;
/// What takes back whatever was done to a process.
pub(crate) const MEND: [Verb; 3] = [Verb::Heal, Verb::Resume, Verb::Start];
/// How much of what a failed command printed is told.
const TOLD_CHARS: usize = 300;

/// The file.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hosts {
    /// A file that holds the cluster's secret, if it has one: beside this file, unless it says where.
    pub secret_file: Option<PathBuf>,
    pub peers: Vec<Host>,
    #[serde(default)]
    pub query_nodes: Vec<Host>,
    pub commands: Commands,
}

/// A process of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// A peer's own id; a query node's number.
    pub id: u64,
    /// Where clients reach it: gRPC of a peer, Flight SQL of a query node.
    pub address: String,
    /// What its commands call its machine; the address's host if it is not said.
    pub host: Option<String>,
}

/// What is done to a process, each as a shell takes it. What is not said cannot be asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Commands {
    pub start: Option<String>,
    pub kill: Option<String>,
    /// Ends the process in order, and waits for its end.
    pub stop: Option<String>,
    pub pause: Option<String>,
    pub resume: Option<String>,
    /// Nothing passes any more between the peer, or the query node, and the other peers; clients still reach it.
    pub partition: Option<String>,
    /// The wall clock of the process goes `{seconds}` off, such as `+3600`.
    pub clock: Option<String>,
    /// All of that is over, a wrong clock too. Harmless where there is nothing to take back.
    pub heal: Option<String>,
    /// Copies the process's log into `{out}`.
    pub collect: Option<String>,
}

/// One of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verb {
    Start,
    Kill,
    Stop,
    Pause,
    Resume,
    Partition,
    Clock,
    Heal,
    Collect,
}

impl Verb {
    /// As the file has it.
    pub fn name(self) -> &'static str {
        match self {
            Verb::Start => "start",
            Verb::Kill => "kill",
            Verb::Stop => "stop",
            Verb::Pause => "pause",
            Verb::Resume => "resume",
            Verb::Partition => "partition",
            Verb::Clock => "clock",
            Verb::Heal => "heal",
            Verb::Collect => "collect",
        }
    }
}

impl Host {
    fn host(&self) -> &str {
        let of_address = || self.address.rsplit_once(':').map_or(self.address.as_str(), |(host, _)| host);
        self.host.as_deref().unwrap_or_else(of_address)
    }
}

impl Hosts {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// It cannot be read, or what is wrong in it.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).doing(|| format!("reading {}", path.display()))?;
        let wrong = |problem: String| Error::Directory { dir: path.to_owned(), problem };
        let mut hosts: Hosts = toml::from_str(&text).map_err(|e| wrong(e.to_string()))?;
        hosts.check().map_err(wrong)?;
        hosts.secret_file = hosts.secret_file.map(|file| path.with_file_name("").join(file));
        Ok(hosts)
    }

    /// The cluster's secret, if it has one.
    ///
    /// # Errors
    /// Its file cannot be read, or holds none.
    pub fn secret(&self) -> Result<Option<Secret>> {
        let secret = self.secret_file.as_deref().map(Secret::from_file).transpose();
        secret.map_err(|problem| Error::Founding(format!("secret_file: {problem}")))
    }

    fn check(&self) -> Result<(), String> {
        if self.peers.is_empty() {
            return Err("names no peers: write [[peers]] with id and address for each".to_owned());
        }
        for (role, all) in [("peers", &self.peers), ("query_nodes", &self.query_nodes)] {
            if all.len() > MAX_HOSTS {
                return Err(format!("names {} {role}; at most {MAX_HOSTS} can be", all.len()));
            }
            for (n, host) in all.iter().enumerate() {
                if all[..n].iter().any(|other| other.id == host.id) {
                    return Err(format!("names two {role} with id {}", host.id));
                }
                if let Some(unsafe_word) = [host.address.as_str(), host.host()].into_iter().find(|word| !is_plain(word))
                {
                    return Err(format!(
                        "{role}: {unsafe_word:?} is to stand in commands: it may have letters, digits and ._:@- only"
                    ));
                }
            }
        }
        Ok(())
    }

    /// The processes of a role.
    pub fn of(&self, role: Role) -> &[Host] {
        match role {
            Role::Metasrv => &self.peers,
            Role::Query => &self.query_nodes,
        }
    }

    /// All processes.
    pub fn all(&self) -> Vec<ProcessName> {
        let peers = self.peers.iter().map(|host| ProcessName::metasrv(host.id));
        peers.chain(self.query_nodes.iter().map(|host| ProcessName::query(host.id))).collect()
    }

    fn template(&self, verb: Verb) -> Option<&str> {
        let Commands { start, kill, stop, pause, resume, partition, clock, heal, collect } = &self.commands;
        match verb {
            Verb::Start => start,
            Verb::Kill => kill,
            Verb::Stop => stop,
            Verb::Pause => pause,
            Verb::Resume => resume,
            Verb::Partition => partition,
            Verb::Clock => clock,
            Verb::Heal => heal,
            Verb::Collect => collect,
        }
        .as_deref()
    }

    /// Whether the file says how that is done.
    pub fn can(&self, verb: Verb) -> bool {
        self.template(verb).is_some()
    }

    /// The command that does this to a process; `None` if the file does not say how, or there is no such process.
    pub fn command(&self, verb: Verb, name: ProcessName, out: &Path) -> Option<String> {
        let host = self.of(name.role).iter().find(|host| host.id == name.id)?;
        let others = self.peers.iter().filter(|other| name.role == Role::Query || other.id != name.id);
        let others: Vec<&str> = others.map(Host::host).collect();
        let filled = self.template(verb)?.replace("{role}", &name.role.to_string());
        let filled = filled.replace("{id}", &name.id.to_string()).replace("{address}", &host.address);
        let filled = filled.replace("{host}", host.host()).replace("{others}", &others.join(" "));
        let filled = filled.replace("{seconds}", &format!("{:+}", clock_off_s(name.id)));
        Some(filled.replace("{out}", &quoted(&out.display().to_string())))
    }
}

/// By how many seconds a clock is put wrong: some go ahead and some fall behind, and a dry run can say which.
pub fn clock_off_s(id: u64) -> i64 {
    if id % 2 == 1 { CLOCK_OFF_S } else { -CLOCK_OFF_S }
}

/// A word that means only itself to a shell.
fn is_plain(word: &str) -> bool {
    !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || "._:@-".contains(c)) && !word.starts_with('-')
}

fn quoted(path: &str) -> String {
    format!("'{}'", path.replace('\'', "'\\''"))
}

/// What a command has started: killed with whoever gives up waiting for it. What ssh has not done yet must not be done once nobody
/// expects it any more.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        // It may have ended just now.
        let _ = self.0.map(|group| kill_process_group(group, Signal::KILL));
    }
}

/// Runs commands, and writes them down.
#[derive(Debug, Clone)]
pub struct Shell {
    hosts: Hosts,
    /// The run's directory.
    out: PathBuf,
}

impl Shell {
    pub fn new(hosts: Hosts, out: PathBuf) -> Self {
        Self { hosts, out }
    }

    pub fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// Does this to a process, if the file says how; gives whether it does.
    ///
    /// # Errors
    /// The command fails, or does not end in time.
    pub async fn run(&self, verb: Verb, name: ProcessName) -> Result<bool> {
        self.run_within(verb, name, COMMAND_WITHIN).await
    }

    async fn run_within(&self, verb: Verb, name: ProcessName, within: Duration) -> Result<bool> {
        let Some(command) = self.hosts.command(verb, name, &self.out) else { return Ok(false) };
        let doing = || format!("{} of {name} by the command {command:?}", verb.name());
        let mut shell = tokio::process::Command::new("sh");
        shell.args(["-c", &command]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Of its own group: Ctrl-C on a terminal ends the run, and not the command that takes a fault back.
        let shell = shell.process_group(0).kill_on_drop(true).spawn().doing(doing)?;
        let mut group = Group(shell.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?)));
        let ended = tokio::time::timeout(within, shell.wait_with_output()).await;
        let output = match ended {
            Ok(output) => {
                group.0 = None;
                output.doing(doing)?
            }
            Err(_) => {
                drop(group);
                let source = std::io::Error::other(format!("it has not ended after {} s", within.as_secs()));
                return Err(Error::Io { doing: doing(), source });
            }
        };
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        self.write_down(&format!("$ {command}\n{said}{}\n", output.status)).await?;
        if output.status.success() {
            return Ok(true);
        }
        let told: String = said.trim().chars().take(TOLD_CHARS).collect();
        Err(Error::Io { doing: doing(), source: std::io::Error::other(format!("{}: {told}", output.status)) })
    }

    async fn write_down(&self, text: &str) -> Result<()> {
        let path = self.out.join(LOG_FILE);
        let doing = || format!("writing {}", path.display());
        let mut log = tokio::fs::OpenOptions::new().create(true).append(true).open(&path).await.doing(doing)?;
        log.write_all(text.as_bytes()).await.doing(doing)?;
        log.flush().await.doing(doing)
    }

    /// Has these processes run, with nothing wrong around them: heal, resume and start, whatever was done to them. Gives what went
    /// wrong; what the file does not say how to do is left out.
    pub async fn mend(&self, names: &[ProcessName]) -> Vec<String> {
        let mut wrong = Vec::new();
        for name in names {
            for verb in MEND {
                if let Err(e) = self.run(verb, *name).await {
                    wrong.push(e.to_string());
                }
            }
        }
        wrong
    }
}

/// What a run with these faults would do, for people: nothing is run, nobody is asked.
pub fn told(hosts: &Hosts, faults: &[(String, &'static [Verb], Role)], out: &Path) -> String {
    let mut text = String::new();
    let mut part = |heading: &str, verbs: &[Verb], of: Option<Role>| {
        let _ = writeln!(text, "{heading}");
        for name in hosts.all().into_iter().filter(|name| of.is_none_or(|role| name.role == role)) {
            for verb in verbs {
                if let Some(command) = hosts.command(*verb, name, out) {
                    let _ = writeln!(text, "  {:<10} {name:<10} {command}", verb.name());
                }
            }
        }
    };
    for (fault, verbs, role) in faults {
        part(&format!("{fault}, of those that it is done to:"), verbs, Some(*role));
    }
    part("in the end, of all:", &MEND, None);
    part("and then:", &[Verb::Collect], None);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
        [[peers]]
        id = 1
        address = "10.0.0.1:9191"
        host = "db1"
        [[peers]]
        id = 2
        address = "10.0.0.2:9191"
        [[query_nodes]]
        id = 1
        address = "10.0.0.1:9393"
        [commands]
        kill = "ssh {host} 'x=${X} kill {role} {id} {address} from {others}'"
        clock = "ssh {host} date -s '{seconds} seconds'"
        collect = "scp {host}:log {out}/{role}-{id}.log"
    "#;

    #[test]
    fn gaps_are_filled_and_nothing_else() {
        let hosts: Hosts = toml::from_str(FILE).unwrap();
        hosts.check().unwrap();
        let command = |verb, name| hosts.command(verb, name, Path::new("/my run"));
        assert_eq!(
            command(Verb::Kill, ProcessName::metasrv(1)).unwrap(),
            "ssh db1 'x=${X} kill metasrv 1 10.0.0.1:9191 from 10.0.0.2'"
        );
        assert_eq!(command(Verb::Collect, ProcessName::query(1)).unwrap(), "scp 10.0.0.1:log '/my run'/query-1.log");
        assert_eq!(command(Verb::Start, ProcessName::metasrv(1)), None);
        let clocks = [1, 2].map(|id| command(Verb::Clock, ProcessName::metasrv(id)).unwrap());
        assert_eq!(clocks, ["ssh db1 date -s '+3600 seconds'", "ssh 10.0.0.2 date -s '-3600 seconds'"]);
        assert_eq!(command(Verb::Kill, ProcessName::metasrv(7)), None);
    }

    #[test]
    fn the_secret_is_in_a_file_beside_this_one() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("hosts.toml");
        std::fs::write(&file, FILE).unwrap();
        assert_eq!(Hosts::read(&file).unwrap().secret().unwrap(), None);
        std::fs::write(&file, format!("secret_file = \"secret\"\n{FILE}")).unwrap();
        let hosts = Hosts::read(&file).unwrap();
        assert!(hosts.secret().unwrap_err().to_string().contains("secret_file: reading the cluster secret from"));
        std::fs::write(dir.path().join("secret"), "0123456789abcdef\n").unwrap();
        assert_eq!(hosts.secret().unwrap(), Some(Secret::new("0123456789abcdef").unwrap()));
    }

    #[test]
    fn what_could_mean_something_to_a_shell_is_refused() {
        for (wrong, says) in [
            (FILE.replace("\"db1\"", "\"db1; rm -rf /\""), "letters, digits"),
            (FILE.replace("\"db1\"", "\"-oProxyCommand\""), "letters, digits"),
            (FILE.replace("id = 2", "id = 1"), "two peers with id 1"),
        ] {
            let hosts: Hosts = toml::from_str(&wrong).unwrap();
            let problem = hosts.check().unwrap_err();
            assert!(problem.contains(says), "{problem}");
        }
        assert!(toml::from_str::<Hosts>(&FILE.replace("kill =", "kil =")).is_err());
    }

    #[tokio::test]
    async fn a_command_that_fails_is_told_with_what_it_printed() {
        let dir = tempfile::tempdir().unwrap();
        let mut hosts: Hosts = toml::from_str(FILE).unwrap();
        hosts.commands.kill = Some("echo no such unit {id} >&2; exit 3".to_owned());
        hosts.commands.start = Some("echo started {id}".to_owned());
        let shell = Shell::new(hosts, dir.path().to_owned());
        let message = shell.run(Verb::Kill, ProcessName::metasrv(2)).await.unwrap_err().to_string();
        assert!(message.contains("kill of metasrv-2") && message.contains("no such unit 2"), "{message}");
        assert!(shell.run(Verb::Start, ProcessName::metasrv(2)).await.unwrap());
        assert!(!shell.run(Verb::Pause, ProcessName::metasrv(2)).await.unwrap());
        let log = std::fs::read_to_string(dir.path().join(LOG_FILE)).unwrap();
        assert!(log.contains("$ echo started 2\nstarted 2\n"), "{log}");
    }

    /// A shell that waits for `sleep`, as one waits for ssh.
    #[tokio::test]
    async fn a_command_has_a_group_of_its_own_which_ends_with_its_time() {
        let dir = tempfile::tempdir().unwrap();
        let mut hosts: Hosts = toml::from_str(FILE).unwrap();
        hosts.commands.kill = Some("cut -d' ' -f5 /proc/$$/stat; echo $$".to_owned());
        hosts.commands.start = Some(format!("sleep 1000 & echo $! >'{}/pid'; wait", dir.path().display()));
        let shell = Shell::new(hosts, dir.path().to_owned());
        assert!(shell.run(Verb::Kill, ProcessName::metasrv(1)).await.unwrap());
        let log = std::fs::read_to_string(dir.path().join(LOG_FILE)).unwrap();
        let [group, pid] = [1, 2].map(|line| log.lines().nth(line).unwrap());
        assert_eq!(group, pid, "{log}");
        let late = shell.run_within(Verb::Start, ProcessName::metasrv(1), Duration::from_secs(2)).await;
        assert!(late.unwrap_err().to_string().contains("has not ended after 2 s"));
        let pid = std::fs::read_to_string(dir.path().join("pid")).unwrap();
        let stat = Path::new("/proc").join(pid.trim()).join("stat");
        let gone = || async {
            let state = std::fs::read_to_string(&stat).ok();
            let state = state.as_deref().and_then(|stat| stat.rsplit_once(") ")).map(|(_, rest)| rest.to_owned());
            // Until whoever inherits it has looked, it is a zombie.
            if state.as_ref().is_none_or(|state| state.starts_with('Z')) { Ok(()) } else { Err(format!("{state:?}")) }
        };
        crate::probe::until("sleep to be gone", Duration::from_secs(20), gone).await.unwrap();
    }
}
