use std::fs;
use std::sync::{Arc, Mutex};

use super::*;
use crate::probe::until;

const PATIENCE: Duration = Duration::from_secs(60);

struct Fixture {
    dir: tempfile::TempDir,
    process: Process,
    events: broadcast::Receiver<Event>,
    pids: Arc<Mutex<Vec<Option<u32>>>>,
}

/// A process that runs `script` in a shell, with `$DIR` set to a directory of its own.
fn shell(script: &str, policy: Policy) -> Fixture {
    let dir = tempfile::tempdir().unwrap();
    let launch = Launch {
        program: "/bin/sh".into(),
        args: vec!["-c".into(), script.into()],
        env: vec![("DIR".into(), dir.path().into())],
        output: dir.path().join("output"),
        append: false,
    };
    let pids = Arc::new(Mutex::new(Vec::new()));
    let (sender, events) = broadcast::channel(64);
    let seen = pids.clone();
    let process = Process::supervise(
        ProcessName::metasrv(1),
        Box::new(move || Ok(launch.clone())),
        Box::new(move |pid| seen.lock().unwrap().push(pid)),
        policy,
        sender,
    );
    Fixture { dir, process, events, pids }
}

fn quick() -> Policy {
    Policy {
        min_backoff: Duration::from_millis(5),
        max_backoff: Duration::from_millis(40),
        stop_timeout: Duration::from_millis(200),
        ..Policy::default()
    }
}

fn alive(pid: u32) -> bool {
    let raw = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::test_kill_process(raw).is_ok() && !zombie(pid)
}

fn zombie(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| s.contains(") Z "))
}

async fn until_file(path: &Path) {
    until(&path.display().to_string(), PATIENCE, || async {
        if path.exists() { Ok(()) } else { Err("not there".to_owned()) }
    })
    .await
    .unwrap();
}

async fn until_state(process: &Process, mut wanted: impl FnMut(&State) -> bool) -> State {
    let mut watch = process.watch();
    tokio::time::timeout(PATIENCE, watch.wait_for(|s| wanted(s))).await.unwrap().unwrap().clone()
}

#[tokio::test]
async fn a_child_starts_and_stops_when_told() {
    let mut f = shell("exec sleep 1000", Policy { stop_timeout: PATIENCE, ..quick() });
    assert_eq!(f.process.state(), State::default());
    f.process.start().await.unwrap();
    let pid = f.process.state().pid.unwrap();
    assert!(alive(pid));
    f.process.start().await.unwrap();
    assert_eq!(f.process.state().pid, Some(pid), "starting what runs changes nothing");
    f.process.stop().await.unwrap();
    assert!(!alive(pid));
    assert_eq!(f.process.state().last_exit.as_deref(), Some("was killed by signal 15"));
    assert_eq!(*f.pids.lock().unwrap(), [Some(pid), None]);
    assert!(matches!(f.events.try_recv(), Ok(Event::Started { restart: false, .. })));
    assert!(f.events.try_recv().is_err(), "what was asked for is no event");
}

#[tokio::test]
async fn a_child_that_ignores_the_signal_is_killed() {
    let f = shell("trap '' TERM; touch $DIR/ready; while :; do sleep 0.1; done", quick());
    f.process.start().await.unwrap();
    until_file(&f.dir.path().join("ready")).await;
    f.process.stop().await.unwrap();
    assert_eq!(f.process.state().last_exit.as_deref(), Some("was killed by signal 9"));
}

#[tokio::test]
async fn a_child_that_dies_is_reported_and_restarted() {
    let mut f = shell("exec sleep 1000", quick());
    f.process.start().await.unwrap();
    let first = f.process.state().pid.unwrap();
    kill_process(Pid::from_raw(first as i32).unwrap(), Signal::KILL).unwrap();
    let state = until_state(&f.process, |s| s.starts == 2).await;
    assert_ne!(state.pid, Some(first));
    assert_eq!(state.deaths, 1);
    let mut seen = Vec::new();
    while let Ok(event) = f.events.try_recv() {
        seen.push(event.to_string());
    }
    assert!(seen[1].contains(&format!("(pid {first}) was killed by signal 9; restarting")), "{seen:?}");
    f.process.stop().await.unwrap();
}

#[tokio::test]
async fn restarts_back_off_and_end_when_told() {
    let mut f = shell("exit 3", quick());
    f.process.start().await.unwrap();
    until_state(&f.process, |s| s.deaths >= 5).await;
    f.process.stop().await.unwrap();
    let starts = f.process.state().starts;
    let mut waits = Vec::new();
    while let Ok(event) = f.events.try_recv() {
        if let Event::Died { how, restart_in, .. } = event {
            assert_eq!(how, "ended with exit code 3");
            waits.push(restart_in.unwrap().as_millis());
        }
    }
    assert_eq!(waits[..5], [5, 10, 20, 40, 40]);
    // Longer than the longest wait: nothing comes back.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(f.process.state().starts, starts);
}

#[tokio::test]
async fn without_restarts_a_dead_child_stays_down() {
    let f = shell("exit 0", Policy { restart: false, ..quick() });
    f.process.start().await.unwrap();
    let state = until_state(&f.process, |s| s.deaths == 1).await;
    assert_eq!((state.pid, state.starts), (None, 1));
    assert!(f.process.pause().await.is_err());
}

#[tokio::test]
async fn a_killed_child_stays_down_until_started() {
    let f = shell("exec sleep 1000", quick());
    f.process.start().await.unwrap();
    // As the library has it that fakes its clock.
    let pid = f.process.state().pid.unwrap();
    let left = ["faketime_shm_", "sem.faketime_sem_"].map(|name| format!("/dev/shm/{name}{pid}"));
    left.iter().for_each(|path| fs::write(path, "").unwrap());
    f.process.kill().await.unwrap();
    assert!(left.iter().all(|path| !Path::new(path).exists()), "{left:?}");
    tokio::time::sleep(Duration::from_millis(60)).await;
    assert_eq!(f.process.state(), State { starts: 1, last_exit: f.process.state().last_exit, ..State::default() });
    f.process.start().await.unwrap();
    assert_eq!(f.process.state().starts, 2);
}

#[tokio::test]
async fn a_paused_child_stands_still_and_can_be_stopped() {
    let f = shell("exec sleep 1000", Policy { stop_timeout: PATIENCE, ..quick() });
    f.process.start().await.unwrap();
    let pid = f.process.state().pid.unwrap();
    let stopped = || fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| s.contains(") T "));
    f.process.pause().await.unwrap();
    until("a stopped process", PATIENCE, || async { if stopped() { Ok(()) } else { Err("running".into()) } })
        .await
        .unwrap();
    f.process.resume().await.unwrap();
    until("a running process", PATIENCE, || async { if stopped() { Err("stopped".into()) } else { Ok(()) } })
        .await
        .unwrap();
    f.process.pause().await.unwrap();
    f.process.stop().await.unwrap();
    assert_eq!(f.process.state().last_exit.as_deref(), Some("was killed by signal 15"));
}

#[tokio::test]
async fn a_child_notices_through_its_input_that_nobody_is_left() {
    let f = shell("cat; touch $DIR/noticed; exec sleep 1000", quick());
    f.process.start().await.unwrap();
    let noticed = f.dir.path().join("noticed");
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!noticed.exists(), "its input is open while it is supervised");
    let pid = f.process.state().pid.unwrap();
    drop(f.process);
    until("the end of the child", PATIENCE, || async { if alive(pid) { Err("alive".into()) } else { Ok(()) } })
        .await
        .unwrap();
}

#[tokio::test]
async fn a_program_that_is_not_there_is_named() {
    let (events, _) = broadcast::channel(1);
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("output");
    let launcher = move || {
        let output = output.clone();
        Ok(Launch { program: "/nowhere/lake".into(), args: vec![], env: vec![], output, append: false })
    };
    let process = Process::supervise(ProcessName::query(2), Box::new(launcher), Box::new(|_| ()), quick(), events);
    let message = process.start().await.unwrap_err().to_string();
    assert!(message.contains("query-2") && message.contains("/nowhere/lake"), "{message}");
}

#[test]
fn names_are_parsed_as_they_are_shown() {
    for name in [ProcessName::metasrv(1), ProcessName::query(12)] {
        assert_eq!(name.to_string().parse(), Ok(name));
    }
    for wrong in ["metasrv", "metasrv-", "metasrv-x", "meta-1", ""] {
        assert!(wrong.parse::<ProcessName>().is_err(), "{wrong}");
    }
}

#[test]
fn the_tail_of_a_log_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    assert_eq!(tail(&path), "");
    fs::write(&path, "line\n".repeat(100_000) + "the end\n").unwrap();
    let end = tail(&path);
    assert!(end.ends_with("line\nthe end"), "{end}");
    assert!(end.lines().count() <= TAIL_LINES);
}
