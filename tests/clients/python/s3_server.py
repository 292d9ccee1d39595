"""An S3 server for tests: creates a bucket and an access key, prints both, and serves until it is killed."""

import json
import os
import signal

# The first calls set up the bucket and the user; all later ones are authenticated.
SETUP_CALLS = 4
os.environ["INITIAL_NO_AUTH_ACTION_COUNT"] = str(SETUP_CALLS)

import boto3  # noqa: E402: reads the environment
from moto.server import ThreadedMotoServer  # noqa: E402

BUCKET = "output"
POLICY = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
endpoint = f"http://{host}:{port}"
anyone = {
    "endpoint_url": endpoint,
    "region_name": "us-east-1",
    "aws_access_key_id": "setup",
    "aws_secret_access_key": "setup",
}
boto3.client("s3", **anyone).create_bucket(Bucket=BUCKET)
iam = boto3.client("iam", **anyone)
iam.create_user(UserName="codelia")
iam.put_user_policy(UserName="codelia", PolicyName="all", PolicyDocument=json.dumps(POLICY))
key = iam.create_access_key(UserName="codelia")["AccessKey"]
print(f"ready {endpoint} {BUCKET} {key['AccessKeyId']} {key['SecretAccessKey']}", flush=True)
signal.pause()
