#!/usr/bin/env bash
# Fetches the data of the paper-size configs into data/, which may be a link to a larger disk, and
# checks it. Without names it says what there is, how large it is and how long it takes:
#   bash scripts/download.sh
#   bash scripts/download.sh c4 cifar5m
#   bash scripts/download.sh c4 --shards 512
# After an interruption the same command resumes. Later it checks the files against their SHA-256.
# ImageNet is unpacked from your own archives, BART's corpus made of your own text:
#   bash scripts/download.sh imagenet --archives FOLDER
#   bash scripts/download.sh bart --text FOLDER
# MIRROR=URL asks URL/HOST/PATH in place of https://HOST/PATH, and HF_ENDPOINT=URL another hub for C4.
# Only https is spoken, also where a server redirects to; http is accepted from this machine alone,
# and leads to no other.
set -euo pipefail
fail() { echo "error: $*" >&2; exit 2; }

# Sizes are the publishers', times of the network those of 1 Gbit/s and of 100 Mbit/s. C4's are from its
# card; Dodge et al. (2021), Table 1: 156e9 words, so over 152e6 tokens a file. paper.yaml takes 6.6e9,
# of 44 files, the compute-optimal curves of four sweeps 77e9, of 507. A core makes 1.25 million tokens
# a second of a tokeniser of 8,000 pieces; BART's text was measured on the World English Bible.
list="\
c4: 48 of C4's 1,024 English files, its validation, T5's tokeniser (nanolm_c4): 15.6 GB to fetch (2 to\
 21 min), up to 28.9 GB of disk; bash scripts/nanolm_c4.sh prepare tokenises them, 1.5 h of a core
c4 --shards 512: where the training horizon grows with the model: 164 GB to fetch (22 min to 3.6 h), up\
 to 331 GB of disk; 18.6 h of a core
cifar5m: CIFAR-5M's six npz files (vit_cifar5m): 18.5 GB to fetch (2 to 25 min), up to 37 GB of disk; each\
 is unpacked once
cifar10: CIFAR-10's binary version (vit_cifar5m, data.source=cifar10 data.path=data/cifar10): 170 MB to\
 fetch (a minute), up to 360 MB of disk; unpacked in seconds
imagenet: ImageNet's train/ and val/ from your archives (vit_imagenet): nothing to fetch, 155 GB behind a\
 login; up to 155 GB of disk; unpacked in about an hour at 200 MB/s of disk
bart: GPT-2's BPE, and a corpus binarised from your text (bart_span_denoise): 2.1 MB to fetch (a minute);\
 text becomes half its size in data/bart or somewhat more, 1.8 MB a second of a core"

names=() shards=48 archives= text=
while [ "$#" -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;;
    --shards=* | --archives=* | --text=*) word=${1#--}; declare "${word%%=*}=${word#*=}" ;;
    --shards | --archives | --text) [ "$#" -gt 1 ] || fail "$1: expected a value after it"
      declare "${1#--}=$2"; shift ;;
    c4 | cifar5m | cifar10 | imagenet | bart) names+=("$1") ;;
    *) fail "$1: no such data or option; expected c4, cifar5m, cifar10, imagenet, bart, --shards N," \
      "--archives FOLDER or --text FOLDER" ;;
  esac
  shift
done
[[ $shards =~ ^[1-9][0-9]{0,3}$ && $shards -le 1024 ]] ||
  fail "--shards: $shards given, expected 1 to 1024"
[ "${#names[@]}" -gt 0 ] || { echo "$list"; exit; }
for name in "${names[@]}"; do grep "^$name:" <<<"$list"; done

mirror=${MIRROR:-https://} protocol='=https' redirects=5
local='^http://(127\.0\.0\.1|localhost)(:[0-9]+)?(/[^@]*)?$' # no user, whose @ would name another host
if [[ $mirror =~ $local ]]; then
  protocol='=http' redirects=0
elif [[ $mirror != https://* ]]; then
  fail "MIRROR: $mirror given; expected https://, as http can be forged"
fi
[ "$mirror" = https:// ] || mirror=${mirror%/}/

# Receives https://ADDRESS into FOLDER unless it is there; MOST bounds its bytes. What has a published
# SHA-256 is compared with it either way.
fetch() { # ADDRESS FOLDER MOST [SHA-256]
  local name=${1##*/} part=$2/.partial/${1##*/} tries=0 code
  if [ -e "$2/$name" ]; then
    [ -z "${4:-}" ] || echo "$4  $2/$name" | sha256sum --check --status ||
      fail "$2/$name: its SHA-256 is not the published one; delete it and give the same command again"
    return
  fi
  mkdir -p "${part%/*}"
  echo "$2/$name: fetching https://$1" >&2
  # A killed command may have left a complete file, which curl would fail to resume.
  if [ -n "${4:-}" ] && echo "$4  $part" | sha256sum --check --status 2>/dev/null; then
    mv "$part" "$2/$name"
    return
  fi
  # curl before 8.4 bounds only what a server says of a file's size; ulimit bounds what it sends.
  until (ulimit -f $(($3 / 1024 + 1)) && exec curl --fail --location --max-redirs "$redirects" \
    --proto "$protocol" --connect-timeout 20 --speed-limit 1 --speed-time 60 --retry 5 \
    --max-filesize "$3" --no-progress-meter --continue-at - --output "$part" "$mirror$1"); do
    code=$?
    # The connection broke off or stood still: what has come is continued.
    [[ $code =~ ^(18|28|56|92)$ && $((tries += 1)) -lt 6 ]] || fail "$1: did not come (curl ended" \
      "with $code); give the same command again, which goes on where it stopped, or delete $part"
  done
  if [ -n "${4:-}" ] && ! echo "$4  $part" | sha256sum --check --status; then
    rm "$part"
    fail "$1: what came has not the published SHA-256 and is deleted; give the same command again"
  fi
  mv "$part" "$2/$name"
}

# What has no published checksums is compared with its own sums of the time when it came.
compare() { # FOLDER: fails if it has no sums yet
  [ -e "$1/SHA256SUMS" ] || return 1
  (cd "$1" && sha256sum --check --quiet SHA256SUMS) || fail "$1: files are not those of its" \
    "SHA256SUMS; delete these files and SHA256SUMS, and give the same command again"
}
note() { (cd "$1" && sha256sum -- *"$2" >.sums && mv .sums SHA256SUMS); } # FOLDER ENDING

fetch_c4() {
  # The hub's pointer of this commit to spiece.model, the same file for all sizes of T5.
  local commit=a9723ea7f1b39c1eae772870f3b547bf6ef7e6c1
  fetch "huggingface.co/google-t5/t5-base/resolve/$commit/spiece.model" data/t5 791656 \
    d60acb128cf7b7f2536e8f38a5b18a05535c9e14c7a355904270e15b0945ea86
  # A file of C4 has 0.3 GB: whatever a server sends ends at 1 GB.
  (ulimit -f 1000000 && exec python -m scripts.download c4 --shards "$shards")
}
fetch_cifar5m() {
  # github.com/preetum/cifar5m names the bucket and no checksums. A part has 3.1 GB.
  for part in 0 1 2 3 4 5; do
    [ -e "data/cifar5m/cifar5m_part$part.npz" ] ||
      fetch "storage.googleapis.com/gresearch/cifar5m/part$part.npz" data/cifar5m 6200000000
  done
  compare data/cifar5m || { python -m scripts.download cifar5m && note data/cifar5m .npz; }
}
fetch_cifar10() {
  # tensorflow_datasets/url_checksums/cifar10.txt; the authors' page has the MD5 of the same archive.
  fetch www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz data/cifar10 170052171 \
    c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd
  compare data/cifar10/cifar-10-batches-bin || {
    tar -xzf data/cifar10/cifar-10-binary.tar.gz -C data/cifar10 &&
      note data/cifar10/cifar-10-batches-bin .bin
  }
}
fetch_imagenet() { python -m scripts.download imagenet ${archives:+--archives "$archives"}; }
fetch_bart() {
  # OpenAI's own copies, with the checksums that tiktoken compares. fairseq publishes none of dict.txt.
  fetch openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json data/gpt2 1042301 \
    196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783
  fetch openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe data/gpt2 456318 \
    1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5
  fetch dl.fbaipublicfiles.com/fairseq/gpt2_bpe/dict.txt data/gpt2 1200000
  compare data/gpt2 || note data/gpt2 dict.txt
  python -m scripts.download bart ${text:+--text "$text"}
}

set --
. "$(dirname "$0")/environment.sh"
mkdir -p data
needed=0 # MB
for name in "${names[@]}"; do
  case $name in
    c4) of=$((shards * 319 + 330 + (shards < 507 ? 13240 : 167280))) folders="data/c4 data/t5" ;;
    cifar5m) of=37000 folders="data/cifar5m data/cache/cifar5m" ;;
    cifar10) of=360 folders=data/cifar10 ;;
    imagenet) of=154700 folders=data/imagenet ;;
    bart) of=3 folders=data/gpt2 ;;
  esac
  # shellcheck disable=SC2086
  there=$({ du -sk $folders 2>/dev/null || true; } | awk '{ sum += $1 } END { printf "%d", sum * 1024 / 1e6 }')
  needed=$((needed + (there < of ? of - there : 0)))
done
free=$(df -Pk data | awk 'NR == 2 { printf "%d", $4 * 1024 / 1e6 }')
[ "$free" -ge "$needed" ] || fail "$PWD/data: $free MB free, but up to $needed MB needed; free some, or" \
  "make data a link to a folder on a larger disk"
exec 9>data/.download.lock
! command -v flock >/dev/null || flock --nonblock 9 || fail "data: another download is at work there"
for name in "${names[@]}"; do
  "fetch_$name"
  echo "$name: whole and checked"
done
