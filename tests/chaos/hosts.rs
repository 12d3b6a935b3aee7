//! `--cluster hosts:FILE` on processes that plain shell commands manage.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use lake_chaos::matrix::PAIRS;
use lake_chaos::nemesis::clock;
use lake_chaos::ports::{self, Port};
use lake_chaos::probe;
use lake_client::secret::Secret;

use super::install::install;
use super::{ATTEMPTS, LAKE, PATIENCE, Run, assert_code, installed, proofs};

/// Carries what comes at one address to another, until it is killed; but nothing of a process N.pid while there is a file cut-N.
const LINK: &str = "\
import glob, os, socket, sys, threading
at, to = [(host, int(port)) for host, port in (arg.rsplit(':', 1) for arg in sys.argv[1:])]
def opened_by(port):
    lines = [line.split() for line in open('/proc/net/tcp')]
    sockets = ['socket:[%s]' % words[9] for words in lines if words[1].endswith(':%04X' % port)]
    for file in glob.glob('*.pid'):
        fds = '/proc/%s/fd' % open(file).read().strip()
        try:
            if any(os.readlink(os.path.join(fds, fd)) in sockets for fd in os.listdir(fds)):
                return file.removesuffix('.pid')
        except OSError:
            pass
def carry(a, b, who):
    try:
        while (some := a.recv(65536)) and not os.path.exists('cut-%s' % who):
            b.sendall(some)
    except OSError:
        pass
    for end in (a, b):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
listening = socket.create_server(at)
while True:
    near, (_, port) = listening.accept()
    who = opened_by(port)
    try:
        if os.path.exists('cut-%s' % who):
            raise OSError
        far = socket.create_connection(to)
    except OSError:
        near.close()
        continue
    for ends in ((near, far, who), (far, near, who)):
        threading.Thread(target=carry, args=ends, daemon=True).start()
";

/// What every process of a cluster knows.
const SECRET: &str = "known-to-operators";

/// Three peers, and perhaps query nodes, that a script starts, stops and hurts. What runs is stopped in the end.
struct Site {
    dir: PathBuf,
    /// On which port one peer reaches another, by both, where what carries that can be cut; and everybody else a peer, by 0 and that.
    links: BTreeMap<(usize, usize), Port>,
    /// gRPC and Raft, by peer; of query nodes, whose numbers follow, Flight SQL and one that is not used.
    ports: Vec<[Port; 2]>,
}

impl Site {
    fn start(dir: PathBuf) -> Self {
        Self::start_with(dir, 0, false)
    }

    fn start_with(dir: PathBuf, query_nodes: usize, is_linked: bool) -> Self {
        std::fs::create_dir_all(&dir).unwrap();
        let ports: Vec<[Port; 2]> =
            (0..3 + query_nodes).map(|_| [(), ()].map(|()| ports::reserve().unwrap())).collect();
        let least = usize::from(query_nodes == 0);
        let pairs = (least..=3).flat_map(|from| (1..=3).map(move |to| (from, to)));
        let pairs = pairs.filter(|(from, to)| is_linked && from != to);
        let site = Self { dir, links: pairs.map(|pair| (pair, ports::reserve().unwrap())).collect(), ports };
        std::fs::write(site.dir.join("secret"), SECRET).unwrap();
        if is_linked {
            std::fs::create_dir(site.dir.join("links")).unwrap();
            std::fs::write(site.dir.join("link.py"), LINK).unwrap();
        }
        for ((from, to), port) in &site.links {
            let ends = format!("{} {}", port.loopback(), site.address(*to, usize::from(*from > 0)));
            std::fs::write(site.dir.join(format!("links/{from}-{to}")), ends).unwrap();
        }
        let at: Vec<String> = (1..=3).map(|id| site.address(id, 0)).collect();
        let gate = |id| site.links.get(&(0, id)).map_or_else(|| site.address(id, 0), Port::loopback);
        let gates: Vec<String> = (1..=3).map(gate).collect();
        let listens: String = (1..=site.ports.len())
            .map(|id| {
                let peers: Vec<String> = (1..=3).map(|to| format!("{to}={}", site.reached(id, to))).collect();
                let (listen, raft) = (site.address(id, 0), site.address(id, 1));
                let gate = gates.get(id - 1).unwrap_or(&listen);
                format!("{id}) listen={listen} raft={raft} gate={gate} peers={};;\n", peers.join(","))
            })
            .collect();
        // Where clocks can be faked, each peer's goes by a file.
        let environment = match clock::library() {
            Some(library) => clock::environment(&library, &site.dir.join("clocks"), &[1, 2, 3]).unwrap(),
            None => Vec::new(),
        };
        let set = |(name, value): &(OsString, OsString)| {
            format!("{}={} ", name.to_string_lossy(), value.to_string_lossy().replace("{id}", "$1"))
        };
        let environment: String = environment.iter().map(set).collect();
        let script = format!(
            "#!/bin/sh\n\
             cd '{dir}'\n\
             pid=$(cat $2.pid 2>/dev/null)\n\
             alive() {{ grep -q '^State:[[:space:]]*[^ZX]' /proc/$pid/status 2>/dev/null; }}\n\
             case $2 in\n{listens}esac\n\
             case $2 in\n\
             [123]) lake() {{\n\
               exec env {environment} '{LAKE}' metasrv --id $1 --dir data-$1 --listen $listen --raft-listen $raft \
                 --advertise $gate --peers $peers --secret-file secret; }};;\n\
             *) lake() {{\n\
               exec '{LAKE}' query --id query-$1 --dir data-$1 --listen $listen --meta {meta} \
                 --warehouse 'file://{dir}/warehouse' --secret-file secret; }};;\n\
             esac\n\
             case $1 in\n\
             start) alive || {{ lake $2 </dev/null >>log-$2 2>&1 & echo $! >$2.pid; }};;\n\
             kill) kill -KILL $pid; while alive; do sleep 0.05; done;;\n\
             stop) kill -TERM $pid; while alive; do sleep 0.05; done;;\n\
             clock) echo \"$3 x1.0\" >clocks/$2;;\n\
             partition) case $2 in\n\
               [123]) for up in links/[123]-$2.up links/$2-?.up; do kill -KILL $(cat $up/pid); rm -r $up; done;;\n\
               *) touch cut-$2;;\n\
             esac;;\n\
             unlink) for up in links/?-?.up; do kill -KILL $(cat $up/pid); rm -r $up; done;;\n\
             heal) rm -f cut-$2; ! test -d clocks || echo '+0 x1.0' >clocks/$2\n\
               for link in links/?-?; do if mkdir $link.up 2>/dev/null; then\n\
                 python3 link.py $(cat $link) </dev/null >>log-links 2>&1 & echo $! >$link.up/pid\n\
               fi; done;;\n\
             pause) kill -STOP $pid;;\n\
             resume) kill -CONT $pid 2>/dev/null || true;;\n\
             esac\n",
            dir = site.dir.display(),
            meta = gates.join(","),
        );
        std::fs::write(site.script(), script).unwrap();
        std::fs::write(site.file(), site.text()).unwrap();
        (1..=3).for_each(|id| site.control("heal", id));
        (1..=3).for_each(|id| site.control("start", id));
        let until = Instant::now() + PATIENCE;
        while !site.lake(&["meta", "init", "--at", &at.join(",")]).status.success() {
            assert!(Instant::now() < until, "the peers cannot be founded");
            std::thread::sleep(Duration::from_millis(100));
        }
        (4..=site.ports.len()).for_each(|id| site.control("start", id));
        site
    }

    fn script(&self) -> PathBuf {
        self.dir.join("control.sh")
    }

    fn file(&self) -> PathBuf {
        self.dir.join("hosts.toml")
    }

    fn address(&self, id: usize, service: usize) -> String {
        self.ports[id - 1][service].loopback()
    }

    /// Where one peer reaches another, or a query node's number, or itself.
    fn reached(&self, from: usize, to: usize) -> String {
        self.links.get(&(from, to)).map_or_else(|| self.address(to, 1), Port::loopback)
    }

    fn text(&self) -> String {
        let peer = |id| format!("[[peers]]\nid = {id}\naddress = \"{}\"\n", self.address(id, 0));
        let node = |id| format!("[[query_nodes]]\nid = {id}\naddress = \"{}\"\n", self.address(id, 0));
        let peers: String = (1..=3).map(peer).chain((4..=self.ports.len()).map(node)).collect();
        let script = self.script();
        let command = |verb: &str| format!("{verb} = \"sh {} {verb} {{id}}\"\n", script.display());
        let commands: String = ["start", "kill", "stop", "pause", "resume"].map(command).concat();
        let clocks = match clock::library() {
            Some(_) => format!("clock = \"sh {} clock {{id}} {{seconds}}\"\n", script.display()),
            None => String::new(),
        };
        let collect = format!("collect = \"cp {}/log-{{id}} {{out}}/\"\n", self.dir.display());
        let partition = if self.links.is_empty() { String::new() } else { command("partition") };
        let heal = command("heal");
        format!("secret_file = \"secret\"\n{peers}[commands]\n{commands}{clocks}{partition}{heal}{collect}")
    }

    /// What a tool says that knows the secret.
    fn lake(&self, arguments: &[&str]) -> Output {
        Command::new(LAKE).args(arguments).env("LAKE_SECRET_FILE", self.dir.join("secret")).output().unwrap()
    }

    fn control(&self, verb: &str, id: usize) {
        let mut sh = Command::new("sh");
        assert!(sh.arg(self.script()).args([verb, &id.to_string()]).status().unwrap().success(), "{verb} of {id}");
    }

    /// The cluster's id, as soon as all of it serves.
    fn cluster_id(&self) -> String {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let addresses: Vec<String> = (1..=3).map(|id| self.address(id, 0)).collect();
        let secret = Secret::new(SECRET).unwrap();
        let asking = probe::until("the peers to be one cluster", PATIENCE, || async {
            let mut ids = Vec::new();
            for address in &addresses {
                let status = probe::peer_of(address, Some(&secret)).await?;
                ids.extend(status.leader.is_some().then_some(status.cluster_id));
            }
            match ids.first() {
                Some(id) if ids.len() == 3 && !id.is_empty() => Ok(id.clone()),
                _ => Err(format!("{ids:?}")),
            }
        });
        runtime.block_on(asking).unwrap()
    }

    /// What a statement at the first query node says.
    fn sql(&self, statement: &str) -> Output {
        self.lake(&["sql", "--at", &self.address(4, 0), "-c", statement])
    }

    /// Waits until the query nodes serve.
    fn await_query_nodes(&self) {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        for id in 4..=self.ports.len() {
            let address = self.address(id, 0);
            let serving = probe::until("a query node to serve", PATIENCE, || probe::serves(&address));
            runtime.block_on(serving).unwrap();
        }
    }

    /// Keys that runs have left.
    fn keys(&self) -> String {
        let at = self.address(1, 0);
        let listed = self.lake(&["meta", "list", "/kv/", "--at", &at]);
        assert!(listed.status.success(), "{listed:?}");
        String::from_utf8_lossy(&listed.stdout).into_owned()
    }

    fn run(&self, run: &Run, arguments: &str) -> Output {
        let arguments = format!("--cluster hosts:{} {arguments}", self.file().display());
        run.command(&arguments).output().unwrap()
    }

    fn matrix(&self, out: &Path, arguments: &str) -> Output {
        self.matrix_command(out, arguments).output().unwrap()
    }

    fn matrix_command(&self, out: &Path, arguments: &str) -> Command {
        let mut matrix = Command::new(LAKE);
        matrix.args(["chaos", "matrix", "--seed", "7", "--cluster", &format!("hosts:{}", self.file().display())]);
        matrix.args(arguments.split_whitespace()).arg("--out").arg(out);
        matrix.stdin(Stdio::null());
        matrix
    }

    fn heal(&self, out: &Path, cluster_id: &str) -> Output {
        let mut heal = Command::new(LAKE);
        heal.args(["chaos", "heal", "--cluster-id", cluster_id, "--out"]).arg(out).arg(self.file());
        heal.stdin(Stdio::null()).output().unwrap()
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for id in 1..=self.ports.len() {
            // Some may be down already.
            for verb in ["unlink", "kill"] {
                let _ = Command::new("sh").arg(self.script()).args([verb, &id.to_string()]).output();
            }
        }
    }
}

#[test]
fn a_cluster_of_others_is_hurt_by_their_commands_and_left_as_it_was() {
    install(&["libfaketime"], || clock::library().is_none());
    assert!(clock::library().is_some(), "libfaketime is missing");
    let run = Run::new();
    let site = Site::start_with(run.dir.path().join("site"), 0, true);
    let cluster_id = site.cluster_id();
    // Nothing is done without the cluster's name, or under another.
    let unnamed = site.run(&run, "--nemesis kill --time 5s");
    assert_code(&unnamed, 3);
    assert!(String::from_utf8_lossy(&unnamed.stderr).contains("--cluster-id"));
    let misnamed = site.run(&run, "--nemesis kill --time 5s --cluster-id another");
    assert_code(&misnamed, 3);
    assert!(String::from_utf8_lossy(&misnamed.stderr).contains("nothing was done"));
    std::fs::remove_dir_all(run.out()).unwrap();
    let faults = "kill:one,pause,restart,clock,partition";
    let dry = site.run(&run, &format!("--nemesis {faults} --time 20s --dry-run"));
    assert_code(&dry, 0);
    let said = String::from_utf8_lossy(&dry.stdout).into_owned();
    for command in ["kill 2", "resume 3", "stop 1", "start 1", "partition 2", "heal 3"] {
        assert!(said.contains(&format!("control.sh {command}")), "{said}");
    }
    assert!(said.contains("control.sh clock 2 -3600"), "{said}");
    assert!(!run.out().exists(), "a dry run makes nothing");

    let arguments =
        format!("--workload register --nemesis {faults} --time 40s --rate 60 --clients 4 --cluster-id {cluster_id}");
    let output = run.until_judged(|| site.run(&run, &arguments));
    assert_code(&output, 0);
    let history = run.history();
    assert_eq!(installed(&history), faults.split(',').map(|fault| fault.replace(':', "-")).collect());
    assert!(proofs(&history, "restart").iter().all(|proof| proof.matches("it serves").count() == 3));
    assert!(proofs(&history, "clock").iter().all(|proof| proof.contains("s ahead")));
    let cut_off = ["it knows of no leader", "the others have a leader"];
    assert!(proofs(&history, "partition").iter().all(|proof| cut_off.iter().any(|seen| proof.contains(seen))));
    let commands = std::fs::read_to_string(run.out().join("commands.log")).unwrap();
    assert!(commands.contains("control.sh kill") && commands.contains("control.sh start"), "{commands}");
    assert!(run.out().join("log-1").exists(), "logs are collected");
    // Nobody would have noticed.
    assert!(run.results().checks.iter().all(|outcome| outcome.checker != "peers"));
    assert!(!site.keys().contains("/kv/chaos/"), "{}", site.keys());
}

#[test]
fn what_a_run_that_has_died_left_behind_is_healed_by_itself() {
    let run = Run::new();
    let site = Site::start(run.dir.path().join("site"));
    let cluster_id = site.cluster_id();
    // As a run leaves it that was killed: one peer is down, one stands still, and its keys are there.
    let at = site.address(3, 0);
    let put = site.lake(&["meta", "put", "/kv/chaos/register/1", "7", "--at", &at]);
    assert!(put.status.success(), "{put:?}");
    site.control("kill", 1);
    site.control("pause", 2);
    assert_code(&site.heal(run.dir.path(), "another"), 3);
    assert_code(&site.heal(run.dir.path(), &cluster_id), 0);
    assert_eq!(site.cluster_id(), cluster_id);
    assert!(!site.keys().contains("/kv/chaos/"), "{}", site.keys());
}

/// Tables are made and removed again; what others have made is not touched.
#[test]
fn tables_on_a_cluster_of_others_are_a_runs_own_and_are_removed() {
    let run = Run::new();
    let site = Site::start_with(run.dir.path().join("site"), 2, false);
    let cluster_id = site.cluster_id();
    site.await_query_nodes();
    let theirs = site.sql("CREATE SCHEMA chaos");
    assert!(theirs.status.success(), "{theirs:?}");
    let arguments = format!(
        "--workload table --nemesis query-kill:one,kill:leader --time 20s --rate 8 --clients 4 --cluster-id {cluster_id}"
    );
    let refused = site.run(&run, &arguments);
    assert_code(&refused, 3);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("there is a schema chaos"), "{refused:?}");
    std::fs::remove_dir_all(run.out()).unwrap();
    // Without a run's mark it is not touched.
    assert_code(&site.heal(run.dir.path(), &cluster_id), 0);
    let gone = site.sql("DROP SCHEMA chaos");
    assert!(gone.status.success(), "{gone:?}");

    let output = run.until_judged(|| site.run(&run, &arguments));
    assert_code(&output, 0);
    assert_eq!(installed(&run.history()), ["kill-leader".to_owned(), "query-kill-one".to_owned()].into());
    let judged = run.results().checks.into_iter().find(|outcome| outcome.checker == "tables").unwrap();
    assert!(judged.figures["writes"] > 3 && judged.figures["reads"] > 3, "{judged:?}");
    assert!(!site.keys().contains("/kv/chaos/"), "{}", site.keys());

    // As a run leaves it that was killed.
    let left = site.sql("CREATE SCHEMA chaos");
    assert!(left.status.success(), "schemas are left: {left:?}");
    let at = site.address(1, 0);
    let put = site.lake(&["meta", "put", "/kv/chaos/schemas", "1", "--at", &at]);
    assert!(put.status.success(), "{put:?}");
    // One that says nothing is the cluster's by its registry.
    site.control("kill", 4);
    assert_code(&site.heal(run.dir.path(), &cluster_id), 0);
    let gone = site.sql("CREATE SCHEMA chaos");
    assert!(gone.status.success(), "the schema is left: {gone:?}");
}

/// A file whose query node is another cluster's: whatever is to be done, nothing is done to that one.
#[test]
fn a_query_node_of_another_cluster_is_refused_and_left_alone() {
    let run = Run::new();
    let site = Site::start(run.dir.path().join("site"));
    let theirs = Site::start_with(run.dir.path().join("theirs"), 1, false);
    let cluster_id = site.cluster_id();
    theirs.await_query_nodes();
    let node = format!("[[query_nodes]]\nid = 9\naddress = \"{}\"\n[commands]\n", theirs.address(4, 0));
    std::fs::write(site.file(), site.text().replace("[commands]\n", &node)).unwrap();
    let named = format!("query node 9 at {}", theirs.address(4, 0));
    for nemesis in ["query-kill", "none"] {
        let arguments = format!("--workload register --nemesis {nemesis} --time 5s --cluster-id {cluster_id}");
        let refused = site.run(&run, &arguments);
        assert_code(&refused, 3);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(
            said.contains(&named) && said.contains("another cluster") && said.contains("nothing was done"),
            "{said}"
        );
        assert!(!run.out().join("commands.log").exists());
        std::fs::remove_dir_all(run.out()).unwrap();
    }
    assert!(!site.keys().contains("/kv/chaos/"), "{}", site.keys());
    // Peers that a run has left so are healed all the same.
    site.control("kill", 1);
    let healed = site.heal(run.dir.path(), &cluster_id);
    assert_code(&healed, 3);
    let said = String::from_utf8_lossy(&healed.stderr).into_owned();
    assert!(said.contains(&named) && said.contains("was left alone: it is of another cluster"), "{said}");
    assert_eq!(site.cluster_id(), cluster_id);
    let commands = std::fs::read_to_string(run.dir.path().join("commands.log")).unwrap();
    assert!(commands.contains("control.sh start 1") && !commands.contains(" 9\n"), "{commands}");
}

/// A query node that its cluster's peers are not reached by any more, as a command has it, serves on; and reaches them afterwards.
#[test]
fn a_query_node_of_others_is_cut_off_from_their_peers() {
    let run = Run::new();
    let site = Site::start_with(run.dir.path().join("site"), 1, true);
    let cluster_id = site.cluster_id();
    site.await_query_nodes();
    let arguments = "--workload register --nemesis query-partition:one --time 12s --rate 40 --clients 3";
    let output = run.until_judged(|| site.run(&run, &format!("{arguments} --cluster-id {cluster_id}")));
    assert_code(&output, 0);
    let history = run.history();
    assert_eq!(installed(&history), ["query-partition-one".to_owned()].into());
    let proofs = proofs(&history, "query-partition-one");
    assert!(proofs.iter().all(|proof| proof.contains("it serves, and does not reach the leader")), "{proofs:?}");
    let shown = site.sql("SELECT node FROM system.nodes");
    assert!(shown.status.success(), "{shown:?}");
    assert!(!site.keys().contains("/kv/chaos/"), "{}", site.keys());
}

/// A matrix that is killed takes its run with it, which takes back first what it has done: however long the commands for that take.
#[test]
fn a_run_that_outlives_its_matrix_takes_everything_back_before_it_ends() {
    let run = Run::new();
    let site = Site::start(run.dir.path().join("site"));
    let cluster_id = site.cluster_id();
    // Longer, all together, than a process has that owes nobody anything.
    let heals = site.text().replace("heal = \"", "heal = \"sleep 6 && ");
    std::fs::write(site.file(), heals).unwrap();
    let out = run.dir.path().join("matrix");
    let only = "register/kill:leader+partition";
    let mut matrix = site.matrix_command(&out, &format!("--minutes 60 --only {only} --cluster-id {cluster_id}"));
    let mut matrix = matrix.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let place = PAIRS.iter().position(|pair| pair.name() == only).unwrap();
    let dir = out.join(format!("{:02}-{}", place + 1, PAIRS[place].directory()));
    await_that("a peer to be killed", || {
        std::fs::read_to_string(dir.join("commands.log")).is_ok_and(|commands| commands.contains("control.sh kill"))
    });
    matrix.kill().unwrap();
    matrix.wait().unwrap();
    // The last that a run writes.
    await_that("the run to be judged", || dir.join("results.json").exists());
    assert_eq!(site.cluster_id(), cluster_id);
    assert!(!site.keys().contains("/kv/chaos/"), "{}", site.keys());
}

fn await_that(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "still waiting for {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What could not be taken back may be why peers do not agree: nothing is concluded from that.
#[test]
fn a_run_that_cannot_take_everything_back_is_unknown() {
    let run = Run::new();
    let site = Site::start(run.dir.path().join("site"));
    let cluster_id = site.cluster_id();
    // Not that which clocks are set right by.
    let text: String =
        site.text().lines().filter(|line| !line.starts_with("heal")).map(|line| format!("{line}\n")).collect();
    let text = format!("{text}heal = \"echo no such rule; exit 3\"\n");
    std::fs::write(site.file(), text).unwrap();
    let arguments = format!("--nemesis none --time 5s --rate 60 --clients 4 --cluster-id {cluster_id}");
    let output = site.run(&run, &arguments);
    assert_code(&output, 2);
    let results = run.results();
    let ended = results.checks.iter().find(|outcome| outcome.checker == "run").unwrap();
    let why = ended.verdict.reason().unwrap_or_default();
    assert!(why.contains("not every fault could be taken back: ") && why.contains("no such rule"), "{why}");
    assert_code(&site.heal(run.dir.path(), &cluster_id), 3);
}

/// A matrix takes what the cluster's commands can do.
#[test]
fn a_cluster_of_others_is_taken_through_a_matrix() {
    let run = Run::new();
    let site = Site::start(run.dir.path().join("site"));
    let out = run.dir.path().join("matrix");
    let dry = site.matrix(&out, "--minutes 30 --dry-run");
    assert_code(&dry, 0);
    let said = String::from_utf8_lossy(&dry.stdout).into_owned();
    assert!(said.contains("--workload register --nemesis kill:leader --time"), "partition has no command: {said}");
    assert!(said.contains("not run: table/query-kill:one+kill:leader: the file names no query nodes"), "{said}");
    let unnamed = site.matrix(&out, "--minutes 1");
    assert_code(&unnamed, 3);
    assert!(String::from_utf8_lossy(&unnamed.stderr).contains("--cluster-id") && !out.exists());
    let arguments = format!("--minutes 0.8 --only register/kill:leader+partition --cluster-id {}", site.cluster_id());
    let mut output = site.matrix(&out, &arguments);
    // A busy machine may show too little.
    for _ in 1..ATTEMPTS {
        if output.status.code() != Some(2) {
            break;
        }
        std::fs::remove_dir_all(&out).unwrap();
        output = site.matrix(&out, &arguments);
    }
    assert_code(&output, 0);
    let index = std::fs::read_to_string(out.join("index.html")).unwrap();
    assert!(index.contains("1 of 1 runs valid") && index.contains("<td>kill:leader</td>"), "{index}");
    assert!(!site.keys().contains("/kv/chaos/"), "{}", site.keys());
}
