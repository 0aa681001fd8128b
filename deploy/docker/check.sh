#!/usr/bin/env bash
# Does the federation of docker-compose.yml run, and survive, on this machine's Docker engine?
# Twice the same run: undisturbed, then with a SuperNode and the SuperLink killed in the middle.
# Results, models and all private state must be the same bytes.
#
#   deploy/docker/check.sh
#
# COMPOSE       compose command, `docker compose` or `docker-compose`
# BUILD         more arguments of docker build, such as --network host
# BASE_IMAGE, PIP_ARGS, RUN_CONFIG   as in docker-compose.yml
# MINUTES       within which each run has to finish
set -euo pipefail
cd "$(dirname "$0")/../.."

COMPOSE=${COMPOSE:-docker compose}
MINUTES=${MINUTES:-20}
export COMPOSE_PROJECT_NAME=blend-check BLEND_IMAGE=blend:check RUN_NAME=check
WORK=$(mktemp -d)
DEADLINE=0

say() { printf '%6d s  %s\n' "$SECONDS" "$*"; }
fail() { say "FAILED: $*"; $COMPOSE logs --tail 30; exit 1; }
down() { $COMPOSE down --volumes --timeout 10 >>"$WORK/log" 2>&1; }
trap 'down; rm -r "$WORK"' EXIT

# The container of a service, running or not.
container() {
    docker ps --all --quiet --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" \
        --filter "label=com.docker.compose.service=$1"
}
state() { docker inspect --format "$2" "$(container "$1")"; }

up() {
    say "up"
    DEADLINE=$((SECONDS + MINUTES * 60))
    $COMPOSE up --detach --no-build >>"$WORK/log" 2>&1 || { cat "$WORK/log"; fail "up"; }
}

rounds() { # finished so far
    docker exec "$(container superlink)" grep -c round_done /results/check/events.jsonl || true
}

# Waits until a round is done, in a run that goes on.
until_round() {
    until [ "$(rounds 2>>"$WORK/log")" -ge "$1" ] 2>>"$WORK/log"; do
        [ "$(state run '{{.State.Running}}')" = true ] || fail "the run ended before round $1 did"
        [ "$SECONDS" -lt "$DEADLINE" ] || fail "no round $1 within $MINUTES minutes"
        sleep 0.2
    done
}

# SIGKILL for all of a container's processes but its init, which then ends, and with it the
# container, as after a crash. `docker kill` would tell the engine not to restart it.
kill_container() {
    say "kill $1 after round $(rounds)"
    docker exec "$(container "$1")" sh -c 'kill -9 -1' >>"$WORK/log" 2>&1 || true
}

until_end() {
    while [ "$(state run '{{.State.Running}}')" = true ]; do
        [ "$SECONDS" -lt "$DEADLINE" ] || fail "not finished within $MINUTES minutes"
        sleep 1
    done
    [ "$(state run '{{.State.ExitCode}}')" = 0 ] || fail "the run ended with an error"
    for service in superlink site-0 site-1 site-2; do
        [ "$(state "$service" '{{.State.Health.Status}}')" = healthy ] || fail "$service is ill"
    done
    say "finished; restarts: $(for service in superlink site-0 site-1 site-2; do
        printf '%s %s  ' "$service" "$(state "$service" '{{.RestartCount}}')"; done)"
}

# Hashes of the shared and of every site's private tensors.
hashes() {
    docker exec "$(container superlink)" python -c "
import json
results = json.load(open('/results/check/results.json'))
print('shared', results['shared_sha256'])
for client in results['clients']:
    print(client['name'], client['private_sha256'])"
}

hardened() {
    for service in keys superlink register site-0 site-1 site-2 run; do
        facts=$(state "$service" \
            '{{.Config.User}} {{.HostConfig.ReadonlyRootfs}} {{.HostConfig.Privileged}}')
        [ "$facts" = "blend true false" ] || fail "$service: user, read-only, privileged: $facts"
    done
    ! docker exec "$(container site-0)" sh -c 'touch /opt/x || touch /etc/blend/site/x' \
        2>>"$WORK/log" || fail "a site can write where it must not"
}

say "engine $(docker version --format '{{.Server.Version}}'), $($COMPOSE version | head -n 1)"
say "build"
# shellcheck disable=SC2086
docker build ${BUILD:-} --file deploy/docker/Dockerfile --tag "$BLEND_IMAGE" \
    --build-arg BASE_IMAGE="${BASE_IMAGE:-python:3.11-slim-bookworm}" \
    --build-arg PIP_ARGS="${PIP_ARGS:-}" . >"$WORK/log" 2>&1 || { tail "$WORK/log"; exit 1; }
say "image: $(docker image inspect --format '{{.Size}}' "$BLEND_IMAGE") bytes"

up
hardened
until_end
hashes >"$WORK/undisturbed"
cat "$WORK/undisturbed"
down

up
until_round 2
kill_container site-1
until_round 4
kill_container superlink
until_end
hashes >"$WORK/disturbed"
diff "$WORK/undisturbed" "$WORK/disturbed" || fail "other bytes"
say "the same bytes"
down
say "PASSED"
