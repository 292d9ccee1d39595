#!/bin/sh
# Creates what the services of compose.yaml share, once: certificates, the password of the database, the
# key for secrets, and the configuration with their paths.
set -eu
umask 077
cd /setup

curve='-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes'

# issue PATH NAMES: a certificate for either side of a connection.
issue() {
    # shellcheck disable=SC2086 # several words
    openssl req -new $curve -subj /CN=codelia -addext "subjectAltName=$2" -keyout "$1.key" 2>/dev/null |
        openssl x509 -req -CA ca.pem -CAkey ca.key -days 825 -copy_extensions copyall -out "$1.pem" 2>/dev/null
}

create() {
    rm -rf postgres codelia operator
    mkdir postgres codelia operator
    # shellcheck disable=SC2086 # several words
    openssl req -x509 $curve -days 3650 -subj '/CN=Codelia authority' -keyout ca.key -out ca.pem 2>/dev/null
    password=$(openssl rand -hex 24)
    issue postgres/server DNS:postgres
    printf '%s\n' "$password" >postgres/password
    issue codelia/api DNS:api-1,DNS:api-2,DNS:localhost,IP:127.0.0.1
    issue codelia/internal DNS:codelia-worker
    openssl rand -hex 32 >codelia/secrets.key
    cp ca.pem codelia/ca.pem
    cat >codelia/codelia.toml <<END
[database]
url = "postgres://codelia:$password@postgres/codelia?sslmode=verify-full&sslrootcert=/setup/codelia/ca.pem"
[api]
tls_cert = "/setup/codelia/api.pem"
tls_key = "/setup/codelia/api.key"
[internal]
tls_ca = "/setup/codelia/ca.pem"
tls_cert = "/setup/codelia/internal.pem"
tls_key = "/setup/codelia/internal.key"
[secrets]
key_file = "/setup/codelia/secrets.key"
[client]
tls_ca = "/setup/codelia/ca.pem"
END
}

# own USER DIRECTORY: gives it to the user of an image, unless that was done. The directory is last.
own() {
    [ ! -O "$2" ] || chown -R "$1:$1" "$2"
}

[ -e complete ] || create
touch complete
chmod 755 .
own 999 postgres
own 10001 codelia
own 10001 operator
