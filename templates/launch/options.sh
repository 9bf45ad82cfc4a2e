# Words for this script itself; the others are settings of the program.
dry_run="" debug="" settings=()
for word in "$@"; do
  case $word in
    --dry-run) dry_run=yes ;;
    --debug) debug=yes ;;
    *) settings+=("$word") ;;
  esac
done

# Sets a variable, unless it has come set from outside, and notes it for the list that `run` prints.
given=()
give() {
  if [[ -z "${!1+set}" ]]; then
    printf -v "$1" '%s' "$2"
  fi
  export "${1?}"
  given+=("$1=${!1}")
}

# Says what it is about to run, then does so in place of this script.
run() {
  printf '%s\n' "${given[@]}" "$(printf '%q ' "$@")" >&2
  [[ -n "$dry_run" ]] || exec "$@"
}
