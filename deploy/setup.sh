#!/bin/sh
# Creates what the services of compose.yaml share, once: certificates, the password of the database, the
# key for secrets, and the configuration with their paths.
set -eu
umask 077
cd /setup
# It does not exist yet.
unset CODELIA_CONFIG

# random BYTES: prints them in hexadecimal.
random() {
    od -An -v -tx1 -N "$1" /dev/urandom | tr -d ' \n'
    echo
}

create() {
    rm -rf postgres codelia operator
    mkdir operator
    # Two authorities: the database's key is valid for nothing else.
    codelia certs dev --dir postgres --name postgres >/dev/null
    codelia certs dev --dir codelia --name api-1 --name api-2 >/dev/null
    cp postgres/ca.pem codelia/postgres-ca.pem
    mv postgres/api.pem postgres/server.pem
    mv postgres/api.key postgres/server.key
    rm postgres/internal-*
    password=$(random 24)
    printf '%s\n' "$password" >postgres/password
    random 32 >codelia/secrets.key
    cat >codelia/codelia.toml <<END
[database]
url = "postgres://codelia:$password@postgres/codelia?sslmode=verify-full&sslrootcert=/setup/codelia/postgres-ca.pem"
[api]
tls_cert = "/setup/codelia/api.pem"
tls_key = "/setup/codelia/api.key"
[internal]
tls_ca = "/setup/codelia/ca.pem"
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
