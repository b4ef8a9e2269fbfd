"""Tables of calls that are made to Triton itself and through the gateway: the answers must be the same bytes.

``http_cases``    what a caller sends over HTTP: endpoints, framings, inference of every kind, errors
``grpc_cases``    the same for gRPC
The models that they ask for are those of tests/triton_models; tests/component/test_http_triton.py and
test_grpc_triton.py run them.
"""
